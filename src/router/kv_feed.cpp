#include "router/kv_feed.h"

#include <sys/eventfd.h>
#include <unistd.h>
#include <zmq.h>

#include <array>
#include <atomic>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "base/bytes.h"
#include "fleet/kv_sequence.h"
#include "net/zmq.h"

namespace kindred::router {
namespace {

using SteadyClock = std::chrono::steady_clock;
using WorkerId = fleet::KvIndex::WorkerId;

constexpr size_t kBurst = 64;  // messages of one worker before the next worker's turn
constexpr uint64_t kReplayEnd = UINT64_MAX;
constexpr std::chrono::milliseconds kTick{100};

struct Subscription {
  Subscription(net::ZmqSocket with_events, std::optional<net::ZmqSocket> with_replay)
      : events(std::move(with_events)), replay(std::move(with_replay)), sequence(replay.has_value()) {}

  net::ZmqSocket events;
  std::optional<net::ZmqSocket> replay;
  fleet::KvSequence sequence;
  std::optional<std::string> kept;      // payload of the message behind a gap, while it is being filled
  SteadyClock::time_point quiet_since;  // of the replay
};

}  // namespace

class KvFeed::Loop {
 public:
  explicit Loop(std::shared_ptr<fleet::KvIndex> index)
      : index_(std::move(index)), wake_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    KINDRED_CHECK(wake_ >= 0);
    thread_ = std::thread([this] { run(); });
  }
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;
  ~Loop() {
    stop_ = true;
    wake();
    thread_.join();
    close(wake_);
  }

  Status add(WorkerId worker, const std::string& events, const std::string& replay) {
    Result<net::ZmqSocket> subscriber = net::ZmqSocket::connect(context_, net::ZmqKind::kSubscriber, events);
    if (!subscriber) return std::move(subscriber).error();
    std::optional<net::ZmqSocket> dealer;
    if (!replay.empty()) {
      Result<net::ZmqSocket> made = net::ZmqSocket::connect(context_, net::ZmqKind::kDealer, replay);
      if (!made) return std::move(made).error();
      dealer.emplace(*std::move(made));
    }
    // A socket may change threads, with a fence between, which the mutex is.
    post({.worker = worker, .added = Subscription(*std::move(subscriber), std::move(dealer))});
    return {};
  }
  void remove(WorkerId worker) { post({.worker = worker, .removes = true}); }
  void reset(WorkerId worker) { post({.worker = worker}); }

  KvFeedStatus status() const {
    return {
        .gaps = gaps_, .replays = replays_, .resets = resets_, .bad_messages = bad_messages_, .subscriptions = count_};
  }

 private:
  struct Command {
    WorkerId worker = 0;
    std::optional<Subscription> added = {};
    bool removes = false;  // neither: a reset
  };

  void post(Command command) {
    {
      const std::lock_guard lock(mutex_);
      commands_.push_back(std::move(command));
    }
    wake();
  }
  void wake() const {
    const uint64_t one = 1;
    (void)!write(wake_, &one, sizeof(one));
  }

  void run() {
    std::vector<zmq_pollitem_t> items;
    while (!stop_) {
      obey();
      for (auto& [worker, subscription] : subscriptions_) serve(worker, subscription);
      collect(items);
      zmq_poll(items.data(), static_cast<int>(items.size()), kTick.count());
      uint64_t count = 0;
      (void)!read(wake_, &count, sizeof(count));
    }
    subscriptions_.clear();
  }

  void obey() {
    std::vector<Command> commands;
    {
      const std::lock_guard lock(mutex_);
      commands.swap(commands_);
    }
    for (Command& command : commands) {
      const auto known = subscriptions_.find(command.worker);
      if (command.added) {
        subscriptions_.insert_or_assign(command.worker, *std::move(command.added));
      } else if (known != subscriptions_.end()) {
        index_->clear(command.worker);
        ++resets_;
        if (command.removes) {
          subscriptions_.erase(known);
        } else {
          known->second.sequence = fleet::KvSequence(known->second.replay.has_value());
          known->second.kept.reset();
        }
      }
    }
    count_ = subscriptions_.size();
  }

  void collect(std::vector<zmq_pollitem_t>& items) const {
    items.clear();
    items.push_back({.socket = nullptr, .fd = wake_, .events = ZMQ_POLLIN, .revents = 0});
    for (const auto& [worker, subscription] : subscriptions_) {
      const net::ZmqSocket& socket = subscription.kept ? *subscription.replay : subscription.events;
      items.push_back({.socket = socket.handle(), .fd = 0, .events = ZMQ_POLLIN, .revents = 0});
    }
  }

  void serve(WorkerId worker, Subscription& subscription) {
    for (size_t i = 0; i < kBurst && !subscription.kept; ++i) {
      auto parts = subscription.events.receive();
      if (!parts) break;
      const auto number = parts->size() == 3 ? parse_big_endian64((*parts)[1]) : std::nullopt;
      if (number) take_live(worker, subscription, *number, std::move((*parts)[2]));
      else ++bad_messages_;
    }
    if (subscription.kept) take_replayed(worker, subscription);
  }

  void take_live(WorkerId worker, Subscription& subscription, uint64_t number, std::string payload) {
    const fleet::KvSequence::Step step = subscription.sequence.live(number);
    if (step.then != fleet::KvSequence::Then::kReplay) {
      act(worker, step, payload);
      return;
    }
    ++gaps_;
    if (step.reset) act(worker, {.reset = true, .then = fleet::KvSequence::Then::kDrop}, {});
    const std::string from = big_endian64(step.replay_from);
    const std::array<std::string_view, 2> request = {std::string_view(), from};
    subscription.kept = std::move(payload);
    subscription.quiet_since = SteadyClock::now();
    if (subscription.replay->send(request)) ++replays_;
    else finish_replay(worker, subscription);
  }

  void take_replayed(WorkerId worker, Subscription& subscription) {
    for (size_t i = 0; i < kBurst; ++i) {
      const auto parts = subscription.replay->receive();
      if (!parts) break;
      subscription.quiet_since = SteadyClock::now();
      // [empty, number, payload]; some publishers leave out the empty part.
      const size_t size = parts->size();
      const auto number = size == 2 || size == 3 ? parse_big_endian64((*parts)[size - 2]) : std::nullopt;
      if (!number) {
        ++bad_messages_;
        continue;
      }
      if (*number == kReplayEnd) {
        finish_replay(worker, subscription);
        return;
      }
      act(worker, subscription.sequence.replayed(*number), (*parts)[size - 1]);
    }
    if (SteadyClock::now() - subscription.quiet_since > kReplayWait) finish_replay(worker, subscription);
  }

  void finish_replay(WorkerId worker, Subscription& subscription) {
    const std::string payload = *std::move(subscription.kept);
    subscription.kept.reset();
    act(worker, subscription.sequence.resume(), payload);
  }

  void act(WorkerId worker, const fleet::KvSequence::Step& step, std::string_view payload) {
    if (step.reset) {
      ++resets_;
      index_->clear(worker);
    }
    if (step.then == fleet::KvSequence::Then::kApply) index_->apply(worker, as_bytes(payload));
  }

  const std::shared_ptr<fleet::KvIndex> index_;
  const net::ZmqContext context_;
  const int wake_;
  std::atomic<bool> stop_{false};
  std::atomic<uint64_t> gaps_{0}, replays_{0}, resets_{0}, bad_messages_{0};
  std::atomic<size_t> count_{0};
  std::map<WorkerId, Subscription> subscriptions_;  // the thread's own
  std::mutex mutex_;
  std::vector<Command> commands_;  // under the mutex
  std::thread thread_;
};

KvFeed::KvFeed(std::shared_ptr<fleet::KvIndex> index) : loop_(std::make_unique<Loop>(std::move(index))) {}
KvFeed::~KvFeed() = default;

Status KvFeed::add(WorkerId worker, const std::string& events, const std::string& replay) {
  return loop_->add(worker, events, replay);
}
void KvFeed::remove(WorkerId worker) { loop_->remove(worker); }
void KvFeed::reset(WorkerId worker) { loop_->reset(worker); }
KvFeedStatus KvFeed::status() const { return loop_->status(); }

}  // namespace kindred::router
