#include "router/kv_feed.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "base/bytes.h"
#include "base/json.h"
#include "net/zmq.h"
#include "router/testing.h"

namespace kindred::router {
namespace {

using testing::eventually;

std::string big_endian(uint64_t number) {
  std::string out;
  for (int shift = 56; shift >= 0; shift -= 8) out += static_cast<char>(number >> shift);
  return out;
}

// Block `number` of a chain: tokens (number, number).
std::string stored(uint32_t number) {
  const Json parent = number == 0 ? Json(nullptr) : Json(number - 1);
  const Json event = {{"type", "BlockStored"},
                      {"block_hashes", {number}},
                      {"parent_block_hash", parent},
                      {"block_size", 2},
                      {"token_ids", {number, number}}};
  const auto bytes = Json::to_msgpack({{"ts", 1.0}, {"events", Json::array({event})}});
  return std::string(as_text(bytes));
}

// An engine's publisher with its replay socket, as vLLM has them.
class Publisher {
 public:
  explicit Publisher(bool replays)
      : events_(*net::ZmqSocket::bind(context_, net::ZmqKind::kPublisher, "tcp://127.0.0.1:*")) {
    if (!replays) return;
    replay_.emplace(*net::ZmqSocket::bind(context_, net::ZmqKind::kRouter, "tcp://127.0.0.1:*"));
    replay_endpoint_ = replay_->endpoint();
    thread_ = std::thread([this] { answer(); });
  }
  ~Publisher() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
  }
  std::string events() const { return events_.endpoint(); }
  std::string replay() const { return replay_endpoint_; }

  // Kept for replays; sent only if `now`.
  void publish(uint64_t number, const std::string& payload, bool now = true) {
    {
      const std::lock_guard lock(mutex_);
      kept_.emplace_back(number, payload);
    }
    if (now) send(number, payload);
  }
  void send(uint64_t number, std::string_view payload) {
    const std::string bytes = big_endian(number);
    send_parts(std::array<std::string_view, 3>{"", bytes, payload});
  }
  void send_parts(std::span<const std::string_view> parts) { (void)events_.send(parts); }
  size_t asked() const { return asked_; }

 private:
  void answer() {
    while (!stop_) {
      const auto request = replay_->receive();
      if (!request) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        continue;
      }
      if (request->size() != 3 || (*request)[2].size() != 8) continue;
      ++asked_;
      const std::lock_guard lock(mutex_);
      for (const auto& [number, payload] : kept_) {
        const std::string bytes = big_endian(number);
        if (bytes < (*request)[2]) continue;
        (void)replay_->send(std::array<std::string_view, 4>{(*request)[0], "", bytes, payload});
      }
      (void)replay_->send(std::array<std::string_view, 4>{(*request)[0], "", big_endian(UINT64_MAX), ""});
    }
  }

  net::ZmqContext context_;
  net::ZmqSocket events_;
  std::optional<net::ZmqSocket> replay_;
  std::string replay_endpoint_;
  std::mutex mutex_;
  std::vector<std::pair<uint64_t, std::string>> kept_;
  std::atomic<bool> stop_{false};
  std::atomic<size_t> asked_{0};
  std::thread thread_;
};

class KvFeedTest : public ::testing::Test {
 protected:
  uint64_t held(uint32_t worker = 1) const {
    const std::vector<uint32_t> prompt = {0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5};
    for (const auto& one : index_->held(prompt, {})) {
      if (one.worker == worker) return one.tokens;
    }
    return 0;
  }
  // A subscriber sees nothing that was published before its subscription arrived: repeats until it counts.
  void join(Publisher& publisher, uint64_t number = 0) {
    EXPECT_TRUE(eventually([&] {
      publisher.send(number, stored(0));
      return held() > 0;
    }));
  }

  std::shared_ptr<fleet::KvIndex> index_ =
      std::make_shared<fleet::KvIndex>(fleet::PrefixIndexOptions{.budget_bytes = 1 << 20, .workers = 4});
  KvFeed feed_{index_};
};

TEST_F(KvFeedTest, FollowsWhatIsPublished) {
  Publisher publisher(false);
  ASSERT_TRUE(feed_.add(1, publisher.events(), "").ok());
  join(publisher);
  for (uint32_t n = 1; n < 4; ++n) publisher.publish(n, stored(n));
  EXPECT_TRUE(eventually([&] { return held() == 8; }));
  feed_.remove(1);
  EXPECT_TRUE(eventually([&] { return held() == 0 && feed_.status().subscriptions == 0; }));
}

TEST_F(KvFeedTest, AsksForWhatItMissed) {
  Publisher publisher(true);
  for (uint32_t n = 0; n < 4; ++n) publisher.publish(n, stored(n), /*now=*/false);
  ASSERT_TRUE(feed_.add(1, publisher.events(), publisher.replay()).ok());
  publisher.publish(4, stored(4), false);
  EXPECT_TRUE(eventually([&] {
    publisher.send(4, stored(4));
    return held() == 10;
  }));
  EXPECT_GE(publisher.asked(), 1U);
}

TEST_F(KvFeedTest, AGapNobodyFillsForgetsTheWorker) {
  Publisher publisher(false);
  ASSERT_TRUE(feed_.add(1, publisher.events(), "").ok());
  join(publisher);
  publisher.publish(5, stored(1));  // an orphan: nothing before it is known any more
  EXPECT_TRUE(eventually([&] { return index_->status().index.orphans == 1; }));
  EXPECT_EQ(held(), 0U);
  EXPECT_GE(feed_.status().resets, 1U);
}

TEST_F(KvFeedTest, AReplayThatSaysNothingIsGivenUp) {
  Publisher publisher(false), silent(false);
  net::ZmqContext context;
  const auto mute = net::ZmqSocket::bind(context, net::ZmqKind::kRouter, "tcp://127.0.0.1:*");
  ASSERT_TRUE(mute.ok());
  ASSERT_TRUE(feed_.add(1, publisher.events(), mute->endpoint()).ok());
  join(publisher);
  publisher.publish(5, stored(0));
  publisher.publish(6, stored(1));
  EXPECT_TRUE(eventually([&] { return held() == 4; }, std::chrono::seconds(20)));
}

TEST_F(KvFeedTest, ARestartForgetsWhatWasThere) {
  Publisher publisher(false);
  ASSERT_TRUE(feed_.add(1, publisher.events(), "").ok());
  join(publisher);
  publisher.publish(1, stored(1));
  publisher.publish(2, stored(2));
  ASSERT_TRUE(eventually([&] { return held() == 6; }));
  publisher.publish(0, stored(0));
  EXPECT_TRUE(eventually([&] { return held() == 2; }));
  feed_.reset(1);  // said by its health
  EXPECT_TRUE(eventually([&] { return held() == 0; }));
}

TEST_F(KvFeedTest, JunkHarmsNobody) {
  Publisher publisher(false);
  ASSERT_TRUE(feed_.add(1, publisher.events(), "").ok());
  join(publisher);
  const uint64_t bad = feed_.status().bad_messages;
  publisher.send_parts(std::array<std::string_view, 1>{"alone"});
  publisher.send_parts(std::array<std::string_view, 3>{"", "short", "x"});
  publisher.send_parts(std::array<std::string_view, 9>{"1", "2", "3", "4", "5", "6", "7", "8", "9"});
  publisher.send(1, "\xc1 not MessagePack");
  publisher.send(2, stored(1));
  EXPECT_TRUE(eventually([&] { return held() == 4; }));
  EXPECT_EQ(feed_.status().bad_messages, bad + 2);
  EXPECT_GE(index_->status().events.malformed, 1U);
}

TEST_F(KvFeedTest, AWrongEndpointIsSaid) {
  const Status added = feed_.add(1, "nonsense", "");
  ASSERT_FALSE(added.ok());
  EXPECT_NE(added.error().message.find("nonsense"), std::string::npos);
  EXPECT_EQ(feed_.status().subscriptions, 0U);
}

}  // namespace
}  // namespace kindred::router
