// Equal workers share what comes: no policy, by default, sends an idle fleet's requests to its first worker.
#include <gtest/gtest.h>

#include <array>
#include <map>

#include "policy/band.h"
#include "policy/chooser.h"
#include "policy/decode_policy.h"
#include "policy/prefill_policy.h"

namespace kindred::policy {
namespace {

constexpr size_t kWorkers = 4;
constexpr std::array<std::string_view, kWorkers> kUrls = {"http://a:1", "http://b:1", "http://c:1", "http://d:1"};

std::vector<WorkerView> idle_fleet() {
  std::vector<WorkerView> workers;
  for (const std::string_view url : kUrls) workers.push_back({.url = url});
  return workers;
}

// Every worker has between half and twice its share.
void expect_even(const std::map<size_t, int>& times, int requests, std::string_view who) {
  const int mean = requests / static_cast<int>(kWorkers);
  for (size_t w = 0; w < kWorkers; ++w) {
    const int got = times.contains(w) ? times.at(w) : 0;
    EXPECT_GE(got, mean / 2) << who << ", worker " << w;
    EXPECT_LE(got, mean * 2) << who << ", worker " << w;
  }
}

TEST(Ties, EveryDecodePolicySharesAnIdleFleetByDefault) {
  const std::vector<WorkerView> workers = idle_fleet();
  for (const std::string_view name : decode_policy_names()) {
    DecodePolicyOptions options;
    options.name = name;
    const auto policy = make_decode_policy(options);
    ASSERT_TRUE(policy.ok());
    std::map<size_t, int> times;
    for (int i = 0; i < 400; ++i) ++times[(*policy)->choose({.workers = workers}, {})->worker];
    expect_even(times, 400, name);
  }
}

TEST(Ties, EveryPrefillPolicySharesAnIdleFleetByDefault) {
  const std::vector<WorkerView> workers = idle_fleet();
  for (const std::string_view name : prefill_policy_names()) {
    PrefillPolicyOptions options;
    options.name = name;
    const auto policy = make_prefill_policy(options);
    ASSERT_TRUE(policy.ok());
    std::map<size_t, int> times;
    for (int i = 0; i < 400; ++i) ++times[(*policy)->choose({workers}, {})->worker];  // no key to go by
    expect_even(times, 400, name);
  }
}

TEST(Ties, RandomIsSharedToo) {
  const std::vector<WorkerView> workers = idle_fleet();
  const auto policy = make_decode_policy({.name = "least-loaded", .tie_break = "random"});
  ASSERT_TRUE(policy.ok());
  std::map<size_t, int> times;
  for (int i = 0; i < 400; ++i) ++times[(*policy)->choose({.workers = workers}, {})->worker];
  expect_even(times, 400, "random");
}

TEST(Ties, HoldWhenTheCandidatesAlternate) {
  // As with two domains, each with a band of its own.
  Chooser chooser(TieBreak::kRotate, 1);
  const std::vector<WorkerView> workers = idle_fleet();
  const std::vector<uint32_t> low = {0, 1}, high = {2, 3};
  std::map<size_t, int> times;
  for (int i = 0; i < 200; ++i) ++times[chooser.least_loaded(workers, i % 2 == 0 ? low : high)];
  for (size_t w = 0; w < kWorkers; ++w) EXPECT_EQ(times[w], 50) << w;
}

TEST(Ties, HoldWhenTheFirstWorkerComesAndGoes) {
  Chooser chooser(TieBreak::kRotate, 1);
  std::vector<WorkerView> workers = idle_fleet();
  std::map<size_t, int> times;
  for (int i = 0; i < 400; ++i) {
    workers[0].available = i % 2 == 0;
    ++times[chooser.least_loaded(workers, available_workers(workers))];
  }
  expect_even(times, 400, "coming and going");
}

TEST(Ties, SecondBestsOfABandAllJoin) {
  const std::vector<float> scores = {0.9F, 0.2F, 0.2F, 0.1F};
  const std::vector<uint32_t> all = {0, 1, 2, 3};
  EXPECT_EQ(locality_band(scores, all, 0.1F), (std::vector<uint32_t>{0, 1}));  // as published
  EXPECT_EQ(locality_band(scores, all, 0.1F, TiedSeconds::kAll), (std::vector<uint32_t>{0, 1, 2}));
}

TEST(Ties, AWorkerThatStartsSlowlyHasASmallShareWithoutLoadToGoBy) {
  std::vector<WorkerView> workers = idle_fleet();
  workers[0].share = 0.1;
  for (const std::string_view name : {"round-robin", "random"}) {
    DecodePolicyOptions options;
    options.name = name;
    const auto policy = make_decode_policy(options);
    ASSERT_TRUE(policy.ok());
    std::map<size_t, int> times;
    for (int i = 0; i < 4000; ++i) ++times[(*policy)->choose({.workers = workers}, {})->worker];
    EXPECT_GT(times[0], 40) << name;
    EXPECT_LT(times[0], 200) << name;
    for (size_t w = 1; w < kWorkers; ++w) EXPECT_GT(times[w], 1000) << name;
  }
}

}  // namespace
}  // namespace kindred::policy
