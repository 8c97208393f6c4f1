#include "engine/trace_publisher.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/post.hpp>

#include "base/bytes.h"

namespace kindred::engine {

namespace asio = net::asio;

Result<std::shared_ptr<TracePublisher>> TracePublisher::bind(asio::any_io_executor executor, const std::string& host,
                                                             uint16_t port, uint64_t epoch, const Clock& clock) {
  net::ZmqContext context;
  const std::string at = port == 0 ? fmt::format("tcp://{}:*", host) : fmt::format("tcp://{}:{}", host, port);
  auto socket = net::ZmqSocket::bind(context, net::ZmqKind::kPublisher, at);
  if (!socket) return std::move(socket).error();
  return std::shared_ptr<TracePublisher>(  // the constructor is private
      new TracePublisher(std::move(executor), std::move(context), *std::move(socket), epoch, clock));
}

TracePublisher::TracePublisher(asio::any_io_executor executor, net::ZmqContext context, net::ZmqSocket socket,
                               uint64_t epoch, const Clock& clock)
    : executor_(std::move(executor)),
      context_(std::move(context)),
      socket_(std::move(socket)),
      endpoint_(socket_.endpoint()),
      epoch_(epoch),
      clock_(clock),
      timer_(std::make_shared<asio::steady_timer>(executor_)) {}

void TracePublisher::start(uint32_t engines, Source source) {
  source_ = std::move(source);
  last_.resize(engines);
  pending_ = true;
  asio::co_spawn(executor_, run(weak_from_this(), timer_), asio::detached);
}

void TracePublisher::stop() {
  stopped_ = true;
  timer_->cancel();
}

void TracePublisher::changed() {
  if (woken_.exchange(true)) return;
  asio::post(executor_, [weak = weak_from_this()] {
    const auto self = weak.lock();
    if (!self) return;
    self->woken_ = false;
    self->pending_ = true;
    self->timer_->cancel();
  });
}

// Holds the publisher weakly, since it may resume after the publisher's end.
net::Task<void> TracePublisher::run(std::weak_ptr<TracePublisher> weak, std::shared_ptr<asio::steady_timer> timer) {
  for (;;) {
    if (const std::shared_ptr<TracePublisher> self = weak.lock(); self && !self->stopped_) {
      self->push_due(std::chrono::steady_clock::now());
      timer->expires_at(self->next_push());
    } else {
      co_return;
    }
    co_await timer->async_wait(net::kNoThrow);  // cancelled: look again
  }
}

TracePublisher::Time TracePublisher::next_push() const {
  if (pending_) return last_push_ + kLeastInterval;
  Time oldest = Time::max();
  for (const Pushed& pushed : last_) oldest = std::min(oldest, pushed.at);
  return oldest + kHeartbeat;
}

void TracePublisher::push_due(Time now) {
  if (now < next_push()) return;
  pending_ = false;
  last_push_ = now;
  for (uint32_t rank = 0; rank < last_.size(); ++rank) {
    Pushed& last = last_[rank];
    fleet::EngineTrace trace = source_(rank);
    trace.rank = rank;
    trace.epoch = epoch_;
    trace.sequence = last.trace.sequence;
    trace.time_s = last.trace.time_s;
    if (trace == last.trace && now - last.at < kHeartbeat) continue;
    ++trace.sequence;
    trace.time_s = clock_.unix_time_s();
    send(trace);
    last = {std::move(trace), now};
  }
}

void TracePublisher::send(const fleet::EngineTrace& trace) {
  const std::string number = big_endian64(number_++), payload = encode_trace(trace);
  const std::array<std::string_view, 3> parts = {fleet::kTraceTopic, number, payload};
  socket_.send(parts);
}

}  // namespace kindred::engine
