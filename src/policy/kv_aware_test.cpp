#include "policy/kv_aware.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "policy/held_price.h"

namespace kindred::policy {
namespace {

WorkerView worker(double load, double held, bool available = true) {
  return {.load = load, .available = available, .held_tokens = held};
}

KvAware make(double load_factor = 2) { return {Chooser(TieBreak::kLowestIndex, 1), load_factor}; }

TEST(KvAware, WhoHoldsMostOfThePromptWins) {
  KvAware policy = make();
  const std::vector<WorkerView> workers = {worker(1, 0), worker(1, 512), worker(1, 256)};
  const auto decision = policy.choose({workers}, {.prompt_tokens = 1000});
  EXPECT_EQ(decision->worker, 1U);
  EXPECT_EQ(decision->reason, Reason::kHeld);
}

TEST(KvAware, WaitingCostsTokensToo) {
  KvAware policy = make(/*load_factor=*/10);
  // Two requests of 1000 tokens before this one cost more than the 1500 tokens that would be saved.
  const std::vector<WorkerView> workers = {worker(0, 0), worker(2, 1500)};
  EXPECT_EQ(policy.choose({workers}, {.prompt_tokens = 2000})->worker, 0U);
  const std::vector<WorkerView> less = {worker(0, 0), worker(0.5, 1500)};
  EXPECT_EQ(policy.choose({less}, {.prompt_tokens = 2000})->worker, 1U);
}

TEST(KvAware, TheUnitOfLoadDoesNotMatter) {
  for (const double unit : {1.0, 700.0}) {
    KvAware policy = make(/*load_factor=*/10);
    const std::vector<WorkerView> workers = {worker(0, 0), worker(2 * unit, 1500)};
    EXPECT_EQ(policy.choose({workers}, {.prompt_tokens = 2000, .load = unit})->worker, 0U);
    const std::vector<WorkerView> less = {worker(0, 0), worker(0.5 * unit, 1500)};
    EXPECT_EQ(policy.choose({less}, {.prompt_tokens = 2000, .load = unit})->worker, 1U);
  }
}

TEST(KvAware, NobodyGetsFarMoreThanTheMean) {
  // Requests so far were tiny, so that the load of the one that holds the long prompt hardly counts.
  const auto load_of_holder = [](double load_factor) {
    KvAware policy = make(load_factor);
    std::vector<WorkerView> workers(4);
    (void)policy.choose({workers}, {.prompt_tokens = 1});
    workers[2].held_tokens = 1e6;
    for (int i = 0; i < 20; ++i) workers[policy.choose({workers}, {.prompt_tokens = 1e6})->worker].load += 1;
    return workers[2].load;
  };
  EXPECT_GE(load_of_holder(100), 10);
  EXPECT_LE(load_of_holder(1.25), 1.25 * 20 / 4 + 1);
  EXPECT_GE(load_of_holder(1.25), 5);
}

TEST(KvAware, WithoutAnythingHeldItBalances) {
  KvAware policy(Chooser(TieBreak::kRotate, 1), 1.25);
  std::vector<WorkerView> workers(3);
  for (int i = 0; i < 30; ++i) {
    const auto decision = policy.choose({workers}, {.prompt_tokens = 100});
    EXPECT_EQ(decision->reason, Reason::kLeastLoaded);
    workers[decision->worker].load += 1;
  }
  for (const WorkerView& one : workers) EXPECT_EQ(one.load, 10);
}

TEST(KvAware, AnEmptyPromptGoesByLoadAndTheDeadGetNothing) {
  KvAware policy = make();
  const std::vector<WorkerView> workers = {worker(2, 0), worker(0, 900, false), worker(1, 0)};
  EXPECT_EQ(policy.choose({workers}, {})->reason, Reason::kEmptyKey);
  EXPECT_EQ(policy.choose({workers}, {})->worker, 2U);
  EXPECT_EQ(policy.choose({workers}, {.prompt_tokens = 1000})->worker, 2U);
  const std::vector<WorkerView> none = {worker(0, 900, false)};
  EXPECT_FALSE(policy.choose({none}, {.prompt_tokens = 1000}));
}

std::unique_ptr<DecodePolicy> decode(double held_weight) {
  DecodePolicyOptions options;
  options.name = "least-loaded";
  options.tie_break = "lowest-index";
  options.held_weight = held_weight;
  return *make_decode_policy(options);
}

TEST(HeldPrice, BreaksTiesAndWeighsAgainstLoad) {
  const std::vector<WorkerView> tied = {worker(1, 0), worker(1, 800), worker(1, 400)};
  const std::vector<WorkerView> busier = {worker(0, 0), worker(1, 1000)};
  const DecodeRequest request = {.prompt_tokens = 1000};
  EXPECT_EQ(decode(0)->choose({tied}, request)->worker, 0U);
  EXPECT_EQ(decode(0.01)->choose({tied}, request)->worker, 1U);
  EXPECT_EQ(decode(0.01)->choose({busier}, request)->worker, 0U);
  EXPECT_EQ(decode(2)->choose({busier}, request)->worker, 1U);
  // More than the prompt is worth no more than all of it.
  const std::vector<WorkerView> more = {worker(0, 0), worker(1, 1e9)};
  EXPECT_EQ(decode(0.9)->choose({more}, request)->worker, 0U);
}

TEST(HeldPrice, ANegativeWeightIsRefused) {
  DecodePolicyOptions options;
  options.held_weight = -1;
  const auto made = make_decode_policy(options);
  ASSERT_FALSE(made.ok());
  EXPECT_EQ(made.error().field, "held_weight");
}

}  // namespace
}  // namespace kindred::policy
