#include "engine/trace_publisher.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "base/bytes.h"
#include "engine/worker_testing.h"

namespace kindred::engine {
namespace {

using Steady = std::chrono::steady_clock;

class TraceFeed : public ::testing::Test {
 protected:
  void SetUp() override {
    loop_.post([this] {
      auto bound = TracePublisher::bind(loop_.executor(), "127.0.0.1", 0, 77, clock_);
      ASSERT_TRUE(bound.ok()) << bound.error().message;
      publisher_ = *bound;
    });
    auto socket = net::ZmqSocket::connect(context_, net::ZmqKind::kSubscriber, publisher_->endpoint());
    ASSERT_TRUE(socket.ok());
    subscriber_.emplace(*std::move(socket));
    loop_.post([this] {
      publisher_->start(2, [this](uint32_t rank) {
        fleet::EngineTrace trace;
        trace.remaining_prefill_tokens = rank == 1 ? tokens_.load() : 0;
        return trace;
      });
    });
  }
  void TearDown() override {
    loop_.post([this] {
      publisher_->stop();
      publisher_.reset();
    });
  }

  // The next trace; fails after 10 s.
  fleet::EngineTrace hear() {
    for (const auto end = Steady::now() + std::chrono::seconds(10); Steady::now() < end;) {
      const auto parts = subscriber_->receive();
      if (!parts) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        continue;
      }
      EXPECT_EQ(parts->size(), 3U);
      EXPECT_EQ(parts->at(0), fleet::kTraceTopic);
      const auto number = parse_big_endian64(parts->at(1));
      EXPECT_TRUE(number.has_value());
      if (number_) {
        EXPECT_EQ(*number, *number_ + 1);
      }
      number_ = number;
      const auto trace = fleet::parse_trace(as_bytes(parts->at(2)));
      EXPECT_TRUE(trace.ok());
      EXPECT_EQ(trace->epoch, 77U);
      EXPECT_GT(trace->time_s, 1.6e9);
      return *trace;
    }
    ADD_FAILURE() << "nothing was pushed";
    return {};
  }

  SystemClock clock_;
  testing::Loop loop_;
  net::ZmqContext context_;
  std::shared_ptr<TracePublisher> publisher_;
  std::optional<net::ZmqSocket> subscriber_;
  std::atomic<uint64_t> tokens_ = 0;
  std::optional<uint64_t> number_;
};

TEST_F(TraceFeed, WhoComesLateHearsAllWithinAHeartbeatAndSequencesRise) {
  std::map<uint32_t, uint64_t> last;
  for (int i = 0; i < 6; ++i) {
    const fleet::EngineTrace trace = hear();
    EXPECT_GT(trace.sequence, last[trace.rank]);
    last[trace.rank] = trace.sequence;
  }
  EXPECT_EQ(last.size(), 2U);
}

TEST_F(TraceFeed, EveryLastChangeIsPushedAndNoMoreThanOneIn20Ms) {
  while (hear().rank != 1) {
  }
  const auto begin = Steady::now();
  int heard = 0;
  for (uint64_t tokens = 1; Steady::now() - begin < std::chrono::milliseconds(400); ++tokens) {
    tokens_ = tokens;
    publisher_->changed();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  tokens_ = 1'000'000;
  publisher_->changed();
  for (fleet::EngineTrace trace; trace.remaining_prefill_tokens != 1'000'000; trace = hear()) heard += trace.rank == 1;
  const auto intervals = (Steady::now() - begin) / TracePublisher::kLeastInterval;
  EXPECT_LE(heard, intervals + 2);
  EXPECT_GE(heard, 1);
}

}  // namespace
}  // namespace kindred::engine
