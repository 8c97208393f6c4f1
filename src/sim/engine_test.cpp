#include "sim/engine.h"

#include <gtest/gtest.h>

#include <map>

#include "sim/cluster_testing.h"

namespace kindred::sim {
namespace {

class EngineTest : public ::testing::Test {
 protected:
  struct Step {
    StepShape shape;
    std::vector<Emitted> emitted;
    std::vector<uint32_t> fetches;
    bool any = false;
  };

  Engine engine(uint32_t blocks, uint32_t budget = 64, uint32_t max_running = 8, bool cache = true) {
    return Engine({.kv = {.blocks = blocks, .block_tokens = 16, .piece_tokens = 32, .cache = cache},
                   .token_budget = budget,
                   .max_running = max_running});
  }
  Sequence sequence(uint32_t request, uint32_t prompt, uint32_t output) {
    return {.request = request, .prompt_tokens = prompt, .output_tokens = output, .experts = &experts_};
  }
  Step step(Engine& engine) {
    Step out;
    union_.clear();
    out.any = engine.plan(out.shape, union_, out.fetches);
    if (out.any) engine.finish(out.emitted);
    return out;
  }

  testing::TestModel model_;
  RequestExperts experts_{.prompt = testing::flat_counts(model_.shape, 64), .decode = model_.tape};
  ExpertUnion union_{std::make_shared<ExpertRanks>(ExpertRanks::linear(2, 16, 1))};
};

TEST_F(EngineTest, PromptsGoInChunksAndBesideDecodes) {
  Engine e = engine(64);
  e.add(sequence(0, 100, 3));
  Step s = step(e);
  EXPECT_EQ(s.shape.prefill_tokens, 64U);
  EXPECT_DOUBLE_EQ(s.shape.prefill_token_contexts, 64 * 65 / 2);
  EXPECT_TRUE(s.emitted.empty());
  e.add(sequence(1, 40, 1));
  s = step(e);  // the rest of one, a part of the other
  EXPECT_EQ(s.shape.prefill_tokens, 64U);
  EXPECT_DOUBLE_EQ(s.shape.prefill_token_contexts, (36 * 64 + 36 * 37 / 2) + 28 * 29 / 2);
  ASSERT_EQ(s.emitted.size(), 1U);
  EXPECT_EQ(s.emitted[0].generated, 1U);
  s = step(e);
  EXPECT_EQ(s.shape.decode_requests, 1U);
  EXPECT_DOUBLE_EQ(s.shape.decode_context_tokens, 101);
  EXPECT_EQ(s.shape.prefill_tokens, 12U);
  ASSERT_EQ(s.emitted.size(), 2U);
  EXPECT_TRUE(s.emitted[1].finished);
  s = step(e);
  ASSERT_EQ(s.emitted.size(), 1U);
  EXPECT_TRUE(s.emitted[0].finished);
  EXPECT_FALSE(step(e).any);
  EXPECT_EQ(e.pool().used(), 0U);
}

TEST_F(EngineTest, TheLastAdmittedIsPreemptedAndComputesAgain) {
  Engine e = engine(4);  // 64 tokens
  e.add(sequence(0, 31, 8));
  e.add(sequence(1, 31, 8));
  std::map<uint32_t, uint32_t> generated;
  size_t computed = 0;
  for (int i = 0; i < 100; ++i) {
    const Step s = step(e);
    if (!s.any) break;
    computed += s.shape.prefill_tokens;
    for (const Emitted& token : s.emitted) {
      EXPECT_EQ(token.generated, generated[token.request] + 1);
      generated[token.request] = token.generated;
    }
  }
  // 31 + 2 tokens are a third block, which only the first gets. The second has 2 tokens by then: 33 again.
  EXPECT_EQ(e.preemptions(), 1U);
  EXPECT_EQ(computed, 31U + 31 + 33);
  EXPECT_EQ(generated[0], 8U);
  EXPECT_EQ(generated[1], 8U);
  EXPECT_EQ(e.pool().used(), 0U);
}

TEST_F(EngineTest, EqualPrefixesAreComputedOnce) {
  Engine e = engine(64);
  const std::vector<uint64_t> pieces = {5, 6};
  Sequence one = sequence(0, 64, 1);
  one.pieces = pieces;
  e.add(one);
  EXPECT_EQ(step(e).shape.prefill_tokens, 64U);
  one.request = 1;
  e.add(one);
  // Of a prompt that is cached as a whole, the last piece is computed: its last token's output is wanted.
  EXPECT_EQ(step(e).shape.prefill_tokens, 32U);
  EXPECT_EQ(e.cached_tokens(), 32U);
  EXPECT_EQ(e.pool().used(), 0U);
}

TEST_F(EngineTest, WhatWasComputedTwiceIsKeptOnce) {
  Engine e = engine(64, 128);
  const std::vector<uint64_t> pieces = {5, 6};
  for (uint32_t i = 0; i < 2; ++i) {
    Sequence s = sequence(i, 64, 2);
    s.pieces = pieces;
    e.add(s);
  }
  EXPECT_EQ(step(e).shape.prefill_tokens, 128U);
  EXPECT_EQ(e.pool().used(), 4U);
  step(e);
  EXPECT_EQ(e.pool().used(), 0U);
}

TEST_F(EngineTest, BlocksStayWithALeaseUntilItIsReleased) {
  Engine e = engine(4);
  Sequence s = sequence(0, 64, 5);
  s.hands_off = true;
  const uint32_t slot = e.add(s);
  const Step first = step(e);
  ASSERT_EQ(first.emitted.size(), 1U);
  EXPECT_TRUE(first.emitted[0].handed_off);
  e.add(sequence(1, 16, 1));
  EXPECT_FALSE(step(e).any);  // no block is left
  EXPECT_EQ(e.waiting(), 1U);
  e.release(slot);
  EXPECT_TRUE(step(e).any);
  EXPECT_EQ(e.pool().used(), 0U);
}

TEST_F(EngineTest, WhatIsFetchedRunsOnceItIsHere) {
  Engine e = engine(64);
  Sequence s = sequence(0, 20, 3);
  s.fetches = true;
  s.generated = 1;
  const uint32_t slot = e.add(s);
  Step admitted = step(e);
  EXPECT_FALSE(admitted.any);
  EXPECT_EQ(admitted.fetches, std::vector<uint32_t>{slot});
  EXPECT_EQ(e.pool().used(), 2U);
  EXPECT_EQ(e.running(), 1U);
  e.fetched(slot);
  const Step next = step(e);
  EXPECT_EQ(next.shape.decode_requests, 1U);
  EXPECT_DOUBLE_EQ(next.shape.decode_context_tokens, 21);
  ASSERT_EQ(next.emitted.size(), 1U);
  EXPECT_EQ(next.emitted[0].generated, 2U);
}

TEST_F(EngineTest, NoMoreThanMaxRunning) {
  Engine e = engine(64, 64, 2);
  for (uint32_t i = 0; i < 3; ++i) e.add(sequence(i, 16, 4));
  EXPECT_EQ(step(e).shape.prefill_tokens, 32U);
  EXPECT_EQ(e.waiting(), 1U);
}

TEST_F(EngineTest, TheQueuesOrderIsThePolicys) {
  Engine e({.kv = {.blocks = 64, .block_tokens = 16, .piece_tokens = 32, .cache = false},
            .token_budget = 64,
            .max_running = 1,
            .queue = {.policy = policy::QueuePolicy::kSjfAging, .age_ns = 1000}});
  const auto add = [&](uint32_t request, uint32_t prompt, int64_t arrival_ns) {
    Sequence with = sequence(request, prompt, 1);
    with.arrival_ns = arrival_ns;
    e.add(with);
  };
  add(0, 60, 0);
  add(1, 10, 500);
  add(2, 20, 600);
  const auto next = [&](int64_t now_ns) {
    StepShape shape;
    std::vector<uint32_t> fetches;
    std::vector<Emitted> emitted;
    union_.clear();
    EXPECT_TRUE(e.plan(shape, union_, fetches, now_ns));
    e.finish(emitted);
    return emitted.at(0).request;
  };
  EXPECT_EQ(next(700), 1U);   // the shortest
  EXPECT_EQ(next(1001), 0U);  // who has waited for too long
  EXPECT_EQ(next(1001), 2U);
}

TEST_F(EngineTest, SaysWhatPromptsAreLeftToCompute) {
  Engine e = engine(64, 64, 1);
  const uint64_t pieces[] = {7, 8};
  Sequence first = sequence(0, 100, 2);
  first.pieces = pieces;
  e.add(first);
  EXPECT_EQ(e.waiting_prefill_tokens(), 100U);
  StepShape shape;
  std::vector<uint32_t> fetches;
  std::vector<Emitted> emitted;
  e.plan(shape, union_, fetches);
  EXPECT_EQ(e.waiting_prefill_tokens(), 0U);
  EXPECT_EQ(e.remaining_prefill_tokens(), 36U);  // the step under way takes 64
  e.finish(emitted);
  EXPECT_EQ(e.remaining_prefill_tokens(), 36U);
  Sequence second = sequence(1, 100, 2);
  second.pieces = pieces;
  const uint32_t slot = e.add(second);
  EXPECT_EQ(e.waiting_prefill_tokens(), 36U);  // both pieces are cached
  e.release(slot);
  EXPECT_EQ(e.waiting_prefill_tokens(), 0U);
}

}  // namespace
}  // namespace kindred::sim
