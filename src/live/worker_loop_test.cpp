#include "live/worker_loop.h"

#include <gtest/gtest.h>

#include "net/testing.h"
#include "sim/cluster_testing.h"

namespace kindred::live {
namespace {

using namespace std::chrono_literals;
using std::chrono::steady_clock;

class LoopTest : public ::testing::Test {
 protected:
  void make(double host_s, uint32_t blocks = 1024, double kv_token_s = 0) {
    sim::LinearCost cost;
    cost.host_s = host_s;
    cost.kv_token_s = kv_token_s;
    LoopOptions options;
    options.cost = std::make_shared<sim::LinearCost>(cost);
    options.engine.kv = {.blocks = blocks, .block_tokens = 16, .piece_tokens = 16, .cache = true};
    options.queue = 4;
    loop_.call([&] {
      worker_ = std::make_shared<WorkerLoop>(loop_.executor(), options, model_.shape);
      worker_->start();
      return 0;
    });
  }
  void TearDown() override {
    loop_.call([this] {
      worker_->stop();
      worker_.reset();
      return 0;
    });
    loop_.stop();
  }

  Job job(uint32_t prompt, uint32_t output) {
    Job out;
    out.prompt_tokens = prompt;
    out.output_tokens = output;
    out.experts = {.prompt = sim::testing::flat_counts(model_.shape, prompt), .decode = model_.tape};
    return out;
  }
  Result<TicketPtr> submit(Job of) {
    return loop_.call([&] { return worker_->submit(std::move(of)); });
  }
  // How it ended, and when.
  TicketEnd wait(const TicketPtr& ticket) {
    loop_.run([&]() -> net::Task<int> {
      while (ticket->end == TicketEnd::kNone) co_await ticket->changed(ticket->generated, ticket->fetched);
      co_return 0;
    });
    return ticket->end;
  }
  uint32_t used() {
    return loop_.call([&] { return worker_->engines()[0].pool().used(); });
  }

  sim::testing::TestModel model_;
  net::testing::TestLoop loop_;
  std::shared_ptr<WorkerLoop> worker_;
};

TEST_F(LoopTest, TakesAsLongAsItsStepsDo) {
  make(0.004);
  const auto begin = steady_clock::now();
  const auto ticket = submit(job(32, 26));
  ASSERT_TRUE(ticket.ok());
  EXPECT_EQ(wait(*ticket), TicketEnd::kFinished);
  EXPECT_EQ((*ticket)->generated, 26U);
  // 26 steps of 4 ms; a machine that is busy may add to it, never take away.
  EXPECT_GE(steady_clock::now() - begin, 104ms);
  EXPECT_EQ(used(), 0U);
}

TEST_F(LoopTest, AHandedOffRequestKeepsItsBlocksUntilReleased) {
  make(0.001);
  Job prefill = job(64, 5);
  prefill.hands_off = true;
  const auto ticket = submit(std::move(prefill));
  ASSERT_TRUE(ticket.ok());
  EXPECT_EQ(wait(*ticket), TicketEnd::kHandedOff);
  EXPECT_EQ((*ticket)->generated, 1U);
  EXPECT_EQ(used(), 4U);
  loop_.call([&] {
    worker_->release((*ticket)->place);
    return 0;
  });
  EXPECT_EQ(used(), 0U);
}

TEST_F(LoopTest, DecodeWaitsForTheKv) {
  make(0.001, 1024, /*kv_token_s=*/0.001);
  Job decode = job(60, 3);
  decode.fetches = true;
  decode.generated = 1;
  decode.kv_there = [] { return true; };
  const auto begin = steady_clock::now();
  const auto ticket = submit(std::move(decode));
  ASSERT_TRUE(ticket.ok());
  EXPECT_EQ(wait(*ticket), TicketEnd::kFinished);
  EXPECT_TRUE((*ticket)->fetched);
  EXPECT_GE(steady_clock::now() - begin, 62ms);
}

TEST_F(LoopTest, KvThatIsGoneEndsTheRequest) {
  make(0.001, 1024, 0.0001);
  Job decode = job(60, 3);
  decode.fetches = true;
  decode.generated = 1;
  decode.kv_there = [] { return false; };
  const auto ticket = submit(std::move(decode));
  ASSERT_TRUE(ticket.ok());
  EXPECT_EQ(wait(*ticket), TicketEnd::kKvLost);
  EXPECT_EQ(used(), 0U);
}

TEST_F(LoopTest, AbandonedRequestsFreeWhatTheyHad) {
  make(0.002);
  const auto ticket = submit(job(64, 10'000));
  ASSERT_TRUE(ticket.ok());
  loop_.run([&]() -> net::Task<int> {
    co_await (*ticket)->changed(2, false);
    co_return 0;
  });
  loop_.call([&] {
    worker_->abandon(*ticket);
    return 0;
  });
  EXPECT_EQ(wait(*ticket), TicketEnd::kCancelled);
  const auto next = submit(job(16, 2));  // ends after the step in which the other one was left
  ASSERT_TRUE(next.ok());
  EXPECT_EQ(wait(*next), TicketEnd::kFinished);
  EXPECT_EQ(used(), 0U);
}

TEST_F(LoopTest, AKillCutsAllAndARevivalStartsEmpty) {
  make(0.002);
  const auto ticket = submit(job(64, 10'000));
  ASSERT_TRUE(ticket.ok());
  loop_.call([&] {
    worker_->kill();
    return 0;
  });
  EXPECT_EQ(wait(*ticket), TicketEnd::kCut);
  EXPECT_FALSE(submit(job(8, 1)).ok());
  loop_.call([&] {
    worker_->revive();
    return 0;
  });
  const auto next = submit(job(8, 2));
  ASSERT_TRUE(next.ok());
  EXPECT_EQ(wait(*next), TicketEnd::kFinished);
  EXPECT_EQ(used(), 0U);
}

TEST_F(LoopTest, AStallHoldsStepsBackAndSlowStretchesThem) {
  make(0.001);
  loop_.call([&] {
    worker_->stall(true);
    return 0;
  });
  const auto ticket = submit(job(16, 20));
  ASSERT_TRUE(ticket.ok());
  std::this_thread::sleep_for(30ms);
  EXPECT_EQ(loop_.call([&] { return (*ticket)->generated; }), 0U);
  const auto begin = steady_clock::now();
  loop_.call([&] {
    worker_->slow(5);
    worker_->stall(false);
    return 0;
  });
  EXPECT_EQ(wait(*ticket), TicketEnd::kFinished);
  EXPECT_GE(steady_clock::now() - begin, 94ms);  // 19 steps; the first was planned before it was slow
}

TEST_F(LoopTest, TheQueueIsBounded) {
  make(0.001, /*blocks=*/4);
  loop_.call([&] {
    worker_->stall(true);
    return 0;
  });
  std::vector<TicketPtr> held;
  for (int i = 0; i < 16; ++i) {
    const auto ticket = submit(job(60, 2));
    if (!ticket) {
      EXPECT_EQ(ticket.error().code, ErrorCode::kExhausted);
      break;
    }
    held.push_back(*ticket);
  }
  EXPECT_GE(held.size(), 4U);
  EXPECT_LE(held.size(), 5U);
  const auto large = submit(job(100, 2));
  ASSERT_FALSE(large.ok());
  EXPECT_EQ(large.error().code, ErrorCode::kTooLarge);
}

}  // namespace
}  // namespace kindred::live
