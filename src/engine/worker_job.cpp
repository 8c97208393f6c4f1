#include "engine/worker_job.h"

#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <mutex>
#include <utility>

namespace kindred::engine {

namespace asio = net::asio;

namespace {

bool is_last(Job::Kind kind, const Event& event) {
  return std::holds_alternative<Error>(event) || std::holds_alternative<Finished>(event) ||
         (kind == Job::Kind::kPrefill && std::holds_alternative<PrefillDone>(event));
}

}  // namespace

class RunningJob::Channel : public std::enable_shared_from_this<RunningJob::Channel> {
 public:
  Channel(asio::any_io_executor executor, Job::Kind kind)
      : executor_(std::move(executor)), kind_(kind), wake_(executor_, asio::steady_timer::time_point::max()) {}

  // On the engine's thread. One wake-up is in flight at most, however many events come meanwhile.
  void push(Event event) {
    {
      const std::lock_guard lock(mutex_);
      events_.push_back(std::move(event));
      if (std::exchange(woken_, true)) return;
    }
    asio::post(executor_, [self = shared_from_this()] {
      {
        const std::lock_guard lock(self->mutex_);
        self->woken_ = false;
      }
      self->wake_.cancel();
    });
  }

  net::Task<std::vector<Event>> take() {
    // Between the look at the queue and the wait nothing else runs on this thread, so no wake-up is lost.
    while (!closed_ && !ended_) {
      std::vector<Event> events = drain();
      if (!events.empty()) {
        ended_ = is_last(kind_, events.back());
        co_return events;
      }
      co_await wake_.async_wait(net::kNoThrow);
    }
    co_return std::vector<Event>();
  }

  void close() {
    closed_ = true;
    wake_.cancel();
  }
  bool ended() const { return ended_; }

 private:
  std::vector<Event> drain() {
    const std::lock_guard lock(mutex_);
    return std::exchange(events_, {});
  }

  asio::any_io_executor executor_;
  Job::Kind kind_;
  asio::steady_timer wake_;
  bool closed_ = false, ended_ = false;

  std::mutex mutex_;  // guards the two below
  std::vector<Event> events_;
  bool woken_ = false;
};

Result<RunningJob> RunningJob::submit(Engine& engine, asio::any_io_executor executor, Job job) {
  auto channel = std::make_shared<Channel>(std::move(executor), job.kind);
  job.on_event = [channel](Event event) { channel->push(std::move(event)); };
  const Result<JobId> id = engine.submit(std::move(job));
  if (!id) return id.error();
  return RunningJob(engine, *id, std::move(channel));
}

RunningJob::RunningJob(Engine& engine, JobId id, std::shared_ptr<Channel> channel)
    : engine_(&engine), id_(id), channel_(std::move(channel)) {}

RunningJob::RunningJob(RunningJob&& other) noexcept
    : engine_(other.engine_), id_(other.id_), channel_(std::move(other.channel_)) {}

RunningJob::~RunningJob() {
  if (channel_ && !channel_->ended()) cancel();
}

net::Task<std::vector<Event>> RunningJob::next() { return channel_->take(); }

void RunningJob::cancel() {
  engine_->cancel(id_);
  channel_->close();
}

}  // namespace kindred::engine
