#include "policy/domain.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

namespace kindred::policy {
namespace {

std::vector<WorkerView> idle_workers(size_t count) {
  static const std::vector<std::string> kUrls = {"http://a", "http://b", "http://c", "http://d"};
  std::vector<WorkerView> out;
  for (size_t w = 0; w < count; ++w) out.push_back({.url = kUrls[w]});
  return out;
}

DomainPolicy policy_with(double load_cap = 1.25) { return {Chooser(TieBreak::kLowestIndex, 1), load_cap}; }

TEST(DomainPolicy, EachLabelHasItsWorkerAndKeepsIt) {
  DomainPolicy policy = policy_with();
  const std::vector<WorkerView> workers = idle_workers(3);
  std::map<std::string, size_t> worker_of;
  for (int round = 0; round < 100; ++round) {
    for (const char* label : {"code", "de", "fr"}) {
      const auto decision = policy.choose({workers}, {.label = label});
      ASSERT_TRUE(decision.has_value());
      EXPECT_EQ(decision->reason, Reason::kDomain);
      EXPECT_EQ(decision->fallback, FallbackReason::kNone);
      EXPECT_EQ(worker_of.try_emplace(label, decision->worker).first->second, decision->worker);
    }
  }
  std::set<size_t> used;
  for (const auto& [label, worker] : worker_of) used.insert(worker);
  EXPECT_EQ(used.size(), 3U);
}

TEST(DomainPolicy, NewLabelsGoWhereTheLeastShareIs) {
  DomainPolicy policy = policy_with();
  const std::vector<WorkerView> workers = idle_workers(2);
  EXPECT_EQ(policy.choose({workers}, {.label = "a"})->worker, 0U);
  EXPECT_EQ(policy.choose({workers}, {.label = "b"})->worker, 1U);
  for (int i = 0; i < 5; ++i) (void)policy.choose({workers}, {.label = "b"});
  EXPECT_EQ(policy.choose({workers}, {.label = "c"})->worker, 0U);
  EXPECT_EQ(policy.choose({workers}, {.label = "d"})->worker, 0U);
}

TEST(DomainPolicy, MovesALabelWhereSharesTurnOutUneven) {
  DomainPolicy policy = policy_with();
  const std::vector<WorkerView> workers = idle_workers(2);
  // All look alike at first, so that the two heavy ones end up together.
  for (const char* label : {"heavy", "x", "light", "y"}) (void)policy.choose({workers}, {.label = label});
  ASSERT_EQ(policy.choose({workers}, {.label = "heavy"})->worker, 0U);
  ASSERT_EQ(policy.choose({workers}, {.label = "light"})->worker, 0U);
  for (uint64_t i = 0; i < 2 * kLabelReviewEvery; ++i) {
    (void)policy.choose({workers}, {.label = i % 3 == 0 ? "light" : "heavy"});
  }
  EXPECT_NE(policy.choose({workers}, {.label = "heavy"})->worker, policy.choose({workers}, {.label = "light"})->worker);
  // Balanced as well as it can be: nothing moves any more.
  const size_t heavy = policy.choose({workers}, {.label = "heavy"})->worker;
  for (uint64_t i = 0; i < 20 * kLabelReviewEvery; ++i) {
    const auto decision = policy.choose({workers}, {.label = i % 3 == 0 ? "light" : "heavy"});
    EXPECT_EQ(decision->worker == heavy, i % 3 != 0);
  }
}

TEST(DomainPolicy, SpillsOverTheLoadCap) {
  DomainPolicy policy = policy_with();
  std::vector<WorkerView> workers = idle_workers(3);
  ASSERT_EQ(policy.choose({workers}, {.label = "a"})->worker, 0U);
  workers[0].load = 8;
  workers[1].load = 2;
  workers[2].load = 1;
  const auto decision = policy.choose({workers}, {.label = "a"});  // limit 1.25 * 12 / 3 = 5
  EXPECT_EQ(decision->worker, 2U);
  EXPECT_EQ(decision->reason, Reason::kSpill);
  EXPECT_EQ(decision->capped, 1U);
  EXPECT_EQ(decision->fallback, FallbackReason::kNone);
  workers[0].load = 4;
  EXPECT_EQ(policy.choose({workers}, {.label = "a"})->worker, 0U);
  DomainPolicy uncapped = policy_with(0);
  workers[0].load = 1000;
  EXPECT_EQ(uncapped.choose({workers}, {.label = "a"})->worker, 0U);
}

TEST(DomainPolicy, WithoutALabelLoadDecidesWithAReason) {
  DomainPolicy policy = policy_with();
  std::vector<WorkerView> workers = idle_workers(2);
  workers[0].load = 3;
  const auto decision = policy.choose({workers}, {});
  EXPECT_EQ(decision->worker, 1U);
  EXPECT_EQ(decision->reason, Reason::kLeastLoaded);
  EXPECT_EQ(decision->fallback, FallbackReason::kNoLabel);
}

TEST(DomainPolicy, RemembersSoManyLabelsAndNoMore) {
  DomainPolicy policy = policy_with();
  const std::vector<WorkerView> workers = idle_workers(2);
  for (size_t i = 0; i < kMaxLabels; ++i) {
    EXPECT_EQ(policy.choose({workers}, {.label = "l" + std::to_string(i)})->fallback, FallbackReason::kNone);
  }
  EXPECT_EQ(policy.choose({workers}, {.label = "one more"})->fallback, FallbackReason::kTooManyLabels);
  EXPECT_EQ(policy.choose({workers}, {.label = "l0"})->fallback, FallbackReason::kNone);
}

TEST(DomainPolicy, ALabelOutlivesItsWorker) {
  DomainPolicy policy = policy_with();
  std::vector<WorkerView> workers = idle_workers(3);
  ASSERT_EQ(policy.choose({workers}, {.label = "a"})->worker, 0U);
  ASSERT_EQ(policy.choose({workers}, {.label = "b"})->worker, 1U);
  workers[0].available = false;  // down: a guest of the worker without labels
  EXPECT_EQ(policy.choose({workers}, {.label = "a"})->worker, 2U);
  workers[0].available = true;
  EXPECT_EQ(policy.choose({workers}, {.label = "a"})->worker, 0U);
  workers.erase(workers.begin());  // gone: b and c are positions 0 and 1 now
  EXPECT_EQ(policy.choose({workers}, {.label = "a"})->worker, 1U);
  EXPECT_EQ(policy.choose({workers}, {.label = "b"})->worker, 0U);
  EXPECT_FALSE(policy.choose({}, {.label = "a"}).has_value());
}

}  // namespace
}  // namespace kindred::policy
