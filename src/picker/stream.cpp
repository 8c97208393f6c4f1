#include "picker/stream.h"

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <utility>

#include "router/decode_room.h"
#include "router/gate.h"

namespace kindred::picker {

using router::ApiError;
using router::Outcome;

// The answer goes past the picker.
class Stream::NoWriter final : public net::ResponseWriter {
 public:
  net::Task<bool> send(int, net::Headers, std::string_view) override { co_return false; }
  net::Task<bool> start(int, net::Headers) override { co_return false; }
  net::Task<bool> write(std::string_view) override { co_return false; }
  net::Task<bool> write_framed(std::string_view) override { co_return false; }
  std::optional<bool> write_framed_now(std::string_view&) override { return false; }
  net::Task<bool> finish() override { co_return false; }
  net::Task<bool> finish_framed() override { co_return false; }
  void abort() override {}
  bool started() const override { return false; }
  uint64_t bytes_written() const override { return 0; }
  bool chunked() const override { return true; }
};

Stream::Stream(router::CorePtr core, router::Loop& loop, std::weak_ptr<Transport> transport, StreamLimits limits)
    : core_(std::move(core)),
      loop_(loop),
      transport_(std::move(transport)),
      limits_(limits),
      deadline_(loop.executor),
      talk_(core_->settings()->options.body_bytes),
      writer_(std::make_unique<NoWriter>()) {}

Stream::~Stream() { end(Outcome::kCancelled); }

void Stream::receive(FromProxy message) {
  if (message.part == Part::kRequestHeaders && !admitted_ && !message.observing) {
    begin(message);
    net::asio::co_spawn(loop_.executor, enter(std::move(message)), net::asio::detached);
    return;
  }
  proceed(talk_.on(std::move(message)));
}

void Stream::closed() {
  gone_.cancel();
  end(talk_.ends_unseen() ? Outcome::kOk : Outcome::kCancelled);
}

void Stream::watch(std::chrono::milliseconds for_ms, std::string_view why) {
  deadline_.expires_after(for_ms);
  deadline_.async_wait([self = weak_from_this(), why](boost::system::error_code cancelled) {
    if (const auto stream = self.lock(); stream && !cancelled) stream->fail(why);
  });
}

void Stream::begin(const FromProxy& message) {
  for (const net::Header& header : message.headers) {
    if (header.name == ":method") request_.head.method = header.value;
    else if (header.name == ":path") request_.head.target = header.value;
    else if (!header.name.starts_with(':')) request_.head.headers.add(header.name, header.value);
  }
  request_.cancel = gone_.token();
  admitted_ = std::make_unique<router::Admitted>(core_, loop_, request_, *writer_);
  watch(limits_.request_ms, "the request did not come in time");
}

net::Task<void> Stream::enter(FromProxy message) {
  const auto self = shared_from_this();
  if (limits_.full) {
    const ApiError error = router::api_error({ErrorCode::kExhausted, "the picker has as many requests as it may"});
    co_return refuse(error);
  }
  Result<router::Claim> claim = router::read_claim(request_.head, {});
  if (!claim) co_return refuse(router::api_error(claim.error()));
  admitted_->lane = claim->lane;
  auto permit = co_await core_->gate->enter(loop_.executor, *std::move(claim), request_.cancel);
  if (ended_) co_return;  // the permit goes with this
  if (!permit) {
    // Whoever waited in vain is turned away for load, as whoever found the queue full.
    const ApiError error = router::api_error({ErrorCode::kExhausted, permit.error().message});
    co_return refuse(error);
  }
  admitted_->permit = *std::move(permit);
  if (admitted_->lane == router::Lane::kBatch) {
    preempted_ = admitted_->permit->preempted().on_cancel([this] { fail("preempted by an interactive request"); });
  }
  proceed(talk_.on(std::move(message)));
}

void Stream::proceed(Conversation::Step step) {
  switch (step.event) {
    case Conversation::Event::kChoose: net::asio::co_spawn(loop_.executor, pick(), net::asio::detached); return;
    case Conversation::Event::kBroken: return fail("messages in an order that the protocol does not have");
    case Conversation::Event::kLetGo:
      if (const auto transport = transport_.lock()) transport->finish();
      return;
    case Conversation::Event::kAnswered: answered(); break;
    case Conversation::Event::kProgress:
      charge_.load.answered();
      if (admitted_ && !admitted_->exchange.notes.first_event) {
        admitted_->exchange.notes.first_event = core_->clock.now();
      }
      break;
    case Conversation::Event::kEnded:
      answered();
      if (charge_.worker) core_->worker_completed(*charge_.worker);
      end(talk_.status() < 400 ? Outcome::kOk : talk_.status() < 500 ? Outcome::kClientError : Outcome::kFailed);
      break;
    case Conversation::Event::kNone:
      // A body that is too long was refused by the conversation itself.
      if (!step.replies.empty() && step.replies.front().part == Part::kImmediate) {
        if (admitted_) admitted_->exchange.status = step.replies.front().status;
        end(Outcome::kClientError);
      }
      break;
  }
  reply(std::move(step.replies));
}

net::Task<void> Stream::pick() {
  const auto self = shared_from_this();
  if (!admitted_) co_return fail("no request headers");
  request_.body = talk_.take_body();
  admitted_->exchange.notes.body_bytes = request_.body.size();
  Picked picked;
  const Hints hints = {.subset = talk_.subset(), .body_seen = talk_.body_seen()};
  const auto refused = co_await choose(core_, admitted_->exchange, hints, picked, charge_);
  if (ended_) {
    charge_ = {};
    co_return;
  }
  if (refused) co_return refuse(*refused);
  watch(limits_.stream_ms, "the stream is open for too long");
  reply(talk_.chosen(std::move(picked)));
}

void Stream::answered() {
  if (!charge_.worker || std::exchange(answered_, true)) return;
  admitted_->exchange.status = talk_.status();
  served_by(*core_, talk_.served(), charge_);
  core_->worker_answered(*charge_.worker, talk_.status());
  // The prompt has been computed.
  charge_.prefill.release();
}

void Stream::refuse(const ApiError& error) {
  auto replies = talk_.refuse(error);
  admitted_->exchange.status = replies.front().status;
  end(error.shed || error.status == 503 ? Outcome::kRejected : Outcome::kClientError);
  reply(std::move(replies));
}

void Stream::end(Outcome outcome) {
  if (std::exchange(ended_, true)) return;
  charge_ = {};
  preempted_ = {};
  deadline_.cancel();
  if (!admitted_) return;
  router::Exchange& exchange = admitted_->exchange;
  // A proxy that answers without a worker tells of that answer, too.
  if (talk_.status() != 0) exchange.status = talk_.status();
  if (outcome == Outcome::kCancelled && talk_.status() != 0) outcome = Outcome::kCut;
  exchange.outcome = outcome;
  if (exchange.notes.first_event && exchange.scan.stream) {
    core_->metrics.ttft_s.observe(seconds_between(exchange.arrived, *exchange.notes.first_event));
  }
  core_->metrics.request_done(exchange.outcome, exchange.status);
  admitted_->permit.reset();
}

void Stream::reply(std::vector<ToProxy> replies) {
  if (const auto transport = transport_.lock()) transport->reply(std::move(replies));
}

void Stream::fail(std::string_view why) {
  gone_.cancel();
  end(Outcome::kCut);
  if (const auto transport = transport_.lock()) transport->fail(why);
}

}  // namespace kindred::picker
