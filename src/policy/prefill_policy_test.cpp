#include "policy/prefill_policy.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace kindred::policy {
namespace {

struct Fleet {
  std::vector<std::string> urls;
  std::vector<WorkerView> workers;

  explicit Fleet(size_t size) {
    for (size_t w = 0; w < size; ++w) urls.push_back("http://10.0.0." + std::to_string(w) + ":8000");
    for (const std::string& url : urls) workers.push_back({.url = url});
  }
};

std::unique_ptr<PrefillPolicy> made(PrefillPolicyOptions options) {
  auto policy = make_prefill_policy(options);
  EXPECT_TRUE(policy.ok()) << policy.error().message;
  return *std::move(policy);
}

TEST(PrefillPolicy, FactoryNamesWhatItAccepts) {
  for (const std::string_view name : prefill_policy_names()) {
    EXPECT_EQ(made({.name = std::string(name)})->name(), name);
  }
  const auto unknown = make_prefill_policy({.name = "fastest"});
  ASSERT_FALSE(unknown.ok());
  EXPECT_NE(unknown.error().message.find("prefix-hash, kv-aware, least-loaded, round-robin"), std::string::npos);
  EXPECT_FALSE(make_prefill_policy({.prefix_bytes = 0}).ok());
  EXPECT_FALSE(make_prefill_policy({.load_factor = 0.9}).ok());
  EXPECT_FALSE(make_prefill_policy({.vnodes = 0}).ok());
  EXPECT_FALSE(make_prefill_policy({.vnodes = 5000}).ok());
  EXPECT_FALSE(make_prefill_policy({.tie_break = "x"}).ok());
}

TEST(PrefillPolicy, NobodyAvailableIsNoDecision) {
  Fleet fleet(2);
  for (WorkerView& worker : fleet.workers) worker.available = false;
  for (const std::string_view name : prefill_policy_names()) {
    const auto policy = made({.name = std::string(name)});
    EXPECT_FALSE(policy->choose({fleet.workers}, {.key = "k"}).has_value());
    EXPECT_FALSE(policy->choose({}, {.key = "k"}).has_value());
  }
}

TEST(PrefillPolicy, RoundRobinAndLeastLoaded) {
  Fleet fleet(3);
  const auto turns = made({.name = "round-robin"});
  for (size_t i = 0; i < 6; ++i) EXPECT_EQ(turns->choose({fleet.workers}, {})->worker, i % 3);
  fleet.workers[0].load = 1;
  const auto least = made({.name = "least-loaded"});
  EXPECT_EQ(least->choose({fleet.workers}, {})->worker, 1U);
  EXPECT_EQ(least->choose({fleet.workers}, {})->worker, 2U);
}

TEST(PrefixHash, SamePrefixSameWorker) {
  Fleet fleet(4);
  const auto policy = made({.prefix_bytes = 8});
  const auto first = policy->choose({fleet.workers}, {.key = "12345678 and so on"});
  EXPECT_EQ(first->reason, Reason::kRing);
  EXPECT_EQ(first->candidates.size(), 1U);
  EXPECT_EQ(policy->choose({fleet.workers}, {.key = "12345678 otherwise"})->worker, first->worker);
}

TEST(PrefixHash, SpillsToTheLeastLoaded) {
  Fleet fleet(4);
  const auto policy = made({});
  const size_t owner = policy->choose({fleet.workers}, {.key = "prompt"})->worker;
  for (WorkerView& worker : fleet.workers) worker.load = 4;
  fleet.workers[owner].load = 9;
  const size_t idle = (owner + 1) % 4;
  fleet.workers[idle].load = 1;
  const auto spilled = policy->choose({fleet.workers}, {.key = "prompt"});
  EXPECT_EQ(spilled->reason, Reason::kSpill);
  EXPECT_EQ(spilled->worker, idle);
  EXPECT_EQ(policy->choose({fleet.workers}, {})->reason, Reason::kEmptyKey);
}

TEST(PrefixHash, OneWorkerLessMovesOnlyItsOwnKeys) {
  Fleet fleet(5);
  const auto policy = made({});
  std::vector<size_t> before;
  for (int key = 0; key < 300; ++key) {
    before.push_back(policy->choose({fleet.workers}, {.key = "key " + std::to_string(key)})->worker);
  }
  fleet.workers[2].available = false;
  for (int key = 0; key < 300; ++key) {
    const size_t now = policy->choose({fleet.workers}, {.key = "key " + std::to_string(key)})->worker;
    EXPECT_NE(now, 2U);
    if (before[static_cast<size_t>(key)] != 2) {
      EXPECT_EQ(now, before[static_cast<size_t>(key)]);
    }
  }
}

TEST(PrefixHash, FollowsAChangedWorkerList) {
  Fleet fleet(5);
  const auto policy = made({});
  std::vector<std::string_view> before;
  for (int key = 0; key < 200; ++key) {
    before.push_back(fleet.workers[policy->choose({fleet.workers}, {.key = "key " + std::to_string(key)})->worker].url);
  }
  std::vector<WorkerView> fewer(fleet.workers.begin() + 1, fleet.workers.end());
  for (int key = 0; key < 200; ++key) {
    const std::string_view now = fewer[policy->choose({fewer}, {.key = "key " + std::to_string(key)})->worker].url;
    if (before[static_cast<size_t>(key)] != fleet.urls[0]) {
      EXPECT_EQ(now, before[static_cast<size_t>(key)]);
    }
  }
}

}  // namespace
}  // namespace kindred::policy
