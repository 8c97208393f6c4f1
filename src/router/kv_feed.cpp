#include "router/kv_feed.h"

#include <array>
#include <atomic>
#include <optional>

#include "base/bytes.h"
#include "fleet/kv_sequence.h"
#include "net/zmq.h"
#include "router/feed_loop.h"

namespace kindred::router {
namespace {

using SteadyClock = std::chrono::steady_clock;
using WorkerId = fleet::KvIndex::WorkerId;

constexpr uint64_t kReplayEnd = UINT64_MAX;

struct KvSubscription {
  KvSubscription(net::ZmqSocket with_events, std::optional<net::ZmqSocket> with_replay)
      : events(std::move(with_events)), replay(std::move(with_replay)), sequence(replay.has_value()) {}

  net::ZmqSocket events;
  std::optional<net::ZmqSocket> replay;
  fleet::KvSequence sequence;
  std::optional<std::string> kept;      // payload of the message behind a gap, while it is being filled
  SteadyClock::time_point quiet_since;  // of the replay
};

}  // namespace

class KvFeed::Loop final : FeedLoop<KvSubscription>::Handler {
 public:
  explicit Loop(std::shared_ptr<fleet::KvIndex> index) : index_(std::move(index)), feed_(*this) {}
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;
  ~Loop() override { feed_.stop(); }

  Status add(WorkerId worker, const std::string& events, const std::string& replay) {
    Result<net::ZmqSocket> subscriber = net::ZmqSocket::connect(context_, net::ZmqKind::kSubscriber, events);
    if (!subscriber) return std::move(subscriber).error();
    std::optional<net::ZmqSocket> dealer;
    if (!replay.empty()) {
      Result<net::ZmqSocket> made = net::ZmqSocket::connect(context_, net::ZmqKind::kDealer, replay);
      if (!made) return std::move(made).error();
      dealer.emplace(*std::move(made));
    }
    feed_.add(worker, KvSubscription(*std::move(subscriber), std::move(dealer)));
    return {};
  }
  FeedLoop<KvSubscription>& feed() { return feed_; }

  KvFeedStatus status() const {
    return {.gaps = gaps_,
            .replays = replays_,
            .resets = resets_,
            .bad_messages = bad_messages_,
            .subscriptions = feed_.size()};
  }

 private:
  const net::ZmqSocket& awaited(const KvSubscription& subscription) const override {
    return subscription.kept ? *subscription.replay : subscription.events;
  }

  void removed(WorkerId worker) override {
    index_->clear(worker);
    ++resets_;
  }

  void reset(WorkerId worker, KvSubscription& subscription) override {
    removed(worker);
    subscription.sequence = fleet::KvSequence(subscription.replay.has_value());
    subscription.kept.reset();
  }

  void serve(WorkerId worker, KvSubscription& subscription) override {
    for (size_t i = 0; i < FeedLoop<KvSubscription>::kBurst && !subscription.kept; ++i) {
      auto parts = subscription.events.receive();
      if (!parts) break;
      const auto number = parts->size() == 3 ? parse_big_endian64((*parts)[1]) : std::nullopt;
      if (number) take_live(worker, subscription, *number, std::move((*parts)[2]));
      else ++bad_messages_;
    }
    if (subscription.kept) take_replayed(worker, subscription);
  }

  void take_live(WorkerId worker, KvSubscription& subscription, uint64_t number, std::string payload) {
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

  void take_replayed(WorkerId worker, KvSubscription& subscription) {
    for (size_t i = 0; i < FeedLoop<KvSubscription>::kBurst; ++i) {
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

  void finish_replay(WorkerId worker, KvSubscription& subscription) {
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
  std::atomic<uint64_t> gaps_{0}, replays_{0}, resets_{0}, bad_messages_{0};
  FeedLoop<KvSubscription> feed_;  // last: its thread uses the rest
};

KvFeed::KvFeed(std::shared_ptr<fleet::KvIndex> index) : loop_(std::make_unique<Loop>(std::move(index))) {}
KvFeed::~KvFeed() = default;

Status KvFeed::add(WorkerId worker, const std::string& events, const std::string& replay) {
  return loop_->add(worker, events, replay);
}
void KvFeed::remove(WorkerId worker) { loop_->feed().remove(worker); }
void KvFeed::reset(WorkerId worker) { loop_->feed().reset(worker); }
KvFeedStatus KvFeed::status() const { return loop_->status(); }

}  // namespace kindred::router
