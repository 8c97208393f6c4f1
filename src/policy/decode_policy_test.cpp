#include "policy/decode_policy.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <set>

namespace kindred::policy {
namespace {

// Three cohorts, one per expert of a single layer; the fourth expert says nothing.
expert::CohortModel cohorts_of_three() {
  expert::CohortData data;
  data.model_fingerprint = "f";
  data.shape = {.layers = {0}, .experts = 4, .top_k = 1};
  data.idf = {1, 1, 1, 0};
  data.layer_mask = {1};
  data.centroids = {1, 0, 0, 0, /**/ 0, 1, 0, 0, /**/ 0, 0, 1, 0};
  return *expert::CohortModel::make(std::move(data));
}

expert::ExpertCounts counts_of(const std::vector<uint32_t>& data) {
  expert::ExpertCounts counts(expert::ExpertShape{.layers = {0}, .experts = 4, .top_k = 1});
  counts.data = data;
  for (const uint32_t c : data) counts.tokens += c;
  return counts;
}

std::vector<WorkerView> workers_with(const std::vector<double>& loads) {
  std::vector<WorkerView> workers;
  for (size_t w = 0; w < loads.size(); ++w) workers.push_back({.load = loads[w], .cohort = static_cast<int32_t>(w)});
  return workers;
}

std::unique_ptr<DecodePolicy> made(DecodePolicyOptions options) {
  auto policy = make_decode_policy(options);
  EXPECT_TRUE(policy.ok()) << policy.error().message;
  return *std::move(policy);
}

TEST(DecodePolicy, FactoryNamesWhatItAccepts) {
  for (const std::string_view name : decode_policy_names()) {
    EXPECT_EQ(made({.name = std::string(name)})->name(), name);
  }
  const auto unknown = make_decode_policy({.name = "fastest"});
  ASSERT_FALSE(unknown.ok());
  EXPECT_NE(unknown.error().message.find("locality-band, least-loaded, power-of-two"), std::string::npos);
  EXPECT_FALSE(make_decode_policy({.tau = -0.1}).ok());
  EXPECT_FALSE(make_decode_policy({.tau = std::nan("")}).ok());
  EXPECT_FALSE(make_decode_policy({.load_cap = 0.5}).ok());
  const auto tie = make_decode_policy({.tie_break = "first"});
  ASSERT_FALSE(tie.ok());
  EXPECT_NE(tie.error().message.find("rotate, lowest-index, random"), std::string::npos);
}

TEST(DecodePolicy, NobodyAvailableIsNoDecision) {
  std::vector<WorkerView> workers = workers_with({0, 0});
  for (WorkerView& worker : workers) worker.available = false;
  for (const std::string_view name : decode_policy_names()) {
    const auto policy = made({.name = std::string(name)});
    EXPECT_FALSE(policy->choose({workers}, {}).has_value()) << name;
    EXPECT_FALSE(policy->choose({}, {}).has_value()) << name;
  }
}

TEST(DecodePolicy, NeverChoosesTheUnavailable) {
  std::vector<WorkerView> workers = workers_with({0, 5, 0, 9});
  workers[0].available = workers[2].available = false;
  for (const std::string_view name : decode_policy_names()) {
    const auto policy = made({.name = std::string(name)});
    for (int i = 0; i < 50; ++i) {
      const auto decision = policy->choose({workers}, {});
      ASSERT_TRUE(decision.has_value());
      EXPECT_EQ(decision->worker % 2, 1U) << name;
      EXPECT_EQ(decision->policy, name);
    }
  }
}

TEST(DecodePolicy, RoundRobinTakesTurns) {
  const auto policy = made({.name = "round-robin"});
  std::vector<WorkerView> workers = workers_with({0, 9, 0});
  for (size_t i = 0; i < 7; ++i) EXPECT_EQ(policy->choose({workers}, {})->worker, i % 3);
  workers[1].available = false;
  EXPECT_EQ(policy->choose({workers}, {})->worker, 2U);
  EXPECT_EQ(policy->choose({workers}, {})->worker, 0U);
}

TEST(DecodePolicy, LeastLoadedAndTieBreaks) {
  const std::vector<WorkerView> workers = workers_with({3, 1, 2, 1});
  const auto lowest = made({.name = "least-loaded", .tie_break = "lowest-index"});
  const auto rotate = made({.name = "least-loaded", .tie_break = "rotate"});
  const auto random = made({.name = "least-loaded", .tie_break = "random"});
  std::set<size_t> drawn;
  for (size_t i = 0; i < 40; ++i) {
    EXPECT_EQ(lowest->choose({workers}, {})->worker, 1U);
    EXPECT_EQ(rotate->choose({workers}, {})->worker, i % 2 == 0 ? 1U : 3U);
    drawn.insert(random->choose({workers}, {})->worker);
  }
  EXPECT_EQ(drawn, (std::set<size_t>{1, 3}));
}

TEST(DecodePolicy, PowerOfTwoDrawsTwoDistinctAndTakesTheLesser) {
  const auto policy = made({.name = "power-of-two", .seed = 3});
  const std::vector<WorkerView> workers = workers_with({0, 1, 2, 3});
  std::array<int, 4> chosen{};
  for (int i = 0; i < 6000; ++i) {
    const auto decision = policy->choose({workers}, {});
    ASSERT_EQ(decision->candidates.size(), 2U);
    EXPECT_LT(decision->candidates[0], decision->candidates[1]);
    EXPECT_EQ(decision->worker, decision->candidates[0]);
    ++chosen[decision->worker];
  }
  // Of the six pairs, three contain worker 0, two more worker 1, one more worker 2.
  EXPECT_NEAR(chosen[0], 3000, 200);
  EXPECT_NEAR(chosen[1], 2000, 200);
  EXPECT_NEAR(chosen[2], 1000, 150);
  EXPECT_EQ(chosen[3], 0);
}

TEST(DecodePolicy, RandomIsUniformAndFollowsItsSeed) {
  const auto a = made({.name = "random", .seed = 8}), b = made({.name = "random", .seed = 8});
  const std::vector<WorkerView> workers = workers_with({0, 0, 0});
  std::array<int, 3> chosen{};
  for (int i = 0; i < 3000; ++i) {
    const size_t worker = a->choose({workers}, {})->worker;
    EXPECT_EQ(worker, b->choose({workers}, {})->worker);
    ++chosen[worker];
  }
  for (const int times : chosen) EXPECT_NEAR(times, 1000, 120);
}

TEST(LocalityBandPolicy, GoesToTheCohortUnlessItIsBusier) {
  const auto cohorts = cohorts_of_three();
  const auto counts = counts_of({1, 8, 3, 0});
  const auto policy = made({.tau = 0.1, .load_cap = 0});
  std::vector<WorkerView> workers = workers_with({0, 4, 4});
  auto decision = policy->choose({workers, &cohorts}, {.counts = &counts});
  // Worker 1 alone is within tau; worker 2, the second nearest, joins; loads tie, rotation starts at 1.
  EXPECT_EQ(decision->candidates, (std::vector<uint32_t>{1, 2}));
  EXPECT_EQ(decision->worker, 1U);
  EXPECT_EQ(decision->reason, Reason::kBand);
  EXPECT_EQ(decision->fallback, FallbackReason::kNone);
  ASSERT_EQ(decision->scores.size(), 3U);
  EXPECT_GT(decision->scores[1], decision->scores[2]);
  workers[2].load = 3;
  EXPECT_EQ(policy->choose({workers, &cohorts}, {.counts = &counts})->worker, 2U);
  const auto strict = made({.tau = 0, .load_cap = 0});
  EXPECT_EQ(strict->choose({workers, &cohorts}, {.counts = &counts})->worker, 1U);
  EXPECT_TRUE(policy->wants_counts());
}

TEST(LocalityBandPolicy, LoadCapPassesOverTheFull) {
  const auto cohorts = cohorts_of_three();
  const auto counts = counts_of({1, 8, 3, 0});
  const auto policy = made({.tau = 0, .load_cap = 1.25});
  std::vector<WorkerView> workers = workers_with({2, 9, 4});  // mean with this request 5.33, limit 7
  const auto decision = policy->choose({workers, &cohorts}, {.counts = &counts});
  EXPECT_EQ(decision->worker, 2U);
  EXPECT_EQ(decision->capped, 1U);
  workers[1].load = 5;
  EXPECT_EQ(policy->choose({workers, &cohorts}, {.counts = &counts})->worker, 1U);
}

TEST(LocalityBandPolicy, CohortsMayBelongToAnyWorker) {
  const auto cohorts = cohorts_of_three();
  const auto counts = counts_of({0, 9, 0, 0});
  const auto policy = made({.tau = 0});
  std::vector<WorkerView> workers = workers_with({0, 0, 0});
  workers[0].cohort = 1;
  workers[1].cohort = 0;
  EXPECT_EQ(policy->choose({workers, &cohorts}, {.counts = &counts})->worker, 0U);
  workers[0].available = false;  // its centroid is out of reach: the others tie at 0
  const auto decision = policy->choose({workers, &cohorts}, {.counts = &counts});
  EXPECT_EQ(decision->candidates, (std::vector<uint32_t>{1, 2}));
}

TEST(LocalityBandPolicy, DegradesToLoadWithAReason) {
  const auto cohorts = cohorts_of_three();
  const auto counts = counts_of({1, 8, 3, 0});
  const auto nothing = counts_of({0, 0, 0, 7});
  expert::ExpertCounts other(expert::ExpertShape{.layers = {1}, .experts = 4, .top_k = 1});
  const auto policy = made({});
  std::vector<WorkerView> workers = workers_with({5, 9, 1});
  const auto fallback = [&](const DecodeSnapshot& snapshot, const DecodeRequest& request) {
    const auto decision = policy->choose(snapshot, request);
    EXPECT_EQ(decision->worker, 2U);  // the least loaded
    EXPECT_EQ(decision->reason, Reason::kLeastLoaded);
    EXPECT_TRUE(decision->scores.empty());
    return decision->fallback;
  };
  EXPECT_EQ(fallback({workers, nullptr}, {.counts = &counts}), FallbackReason::kNoCohorts);
  EXPECT_EQ(fallback({workers, &cohorts}, {}), FallbackReason::kNoCounts);
  EXPECT_EQ(fallback({workers, &cohorts}, {.counts = &counts, .model_fingerprint = "g"}), FallbackReason::kOtherModel);
  EXPECT_EQ(fallback({workers, &cohorts}, {.counts = &other}), FallbackReason::kShapeMismatch);
  EXPECT_EQ(fallback({workers, &cohorts}, {.counts = &nothing}), FallbackReason::kZeroSignature);
  expert::CohortData on_gates = cohorts.data();
  on_gates.transform = expert::Transform::kGate;
  const auto gate_cohorts = expert::CohortModel::make(std::move(on_gates));
  ASSERT_TRUE(gate_cohorts.ok());
  EXPECT_EQ(fallback({workers, &*gate_cohorts}, {.counts = &counts}), FallbackReason::kNoGates);
  for (const int32_t none : {3, -1}) {
    for (WorkerView& worker : workers) worker.cohort = none;
    EXPECT_EQ(fallback({workers, &cohorts}, {.counts = &counts}), FallbackReason::kCohortWorkerMismatch);
  }
  workers[1].cohort = 1;
  workers[1].available = false;  // whoever is not there does not make the others comparable
  EXPECT_EQ(fallback({workers, &cohorts}, {.counts = &counts}), FallbackReason::kCohortWorkerMismatch);
}

TEST(LocalityBandPolicy, AWorkerWithoutACohortTakesWhatIsTooMuchForTheBand) {
  const auto cohorts = cohorts_of_three();
  const auto counts = counts_of({1, 8, 3, 0});
  const auto policy = made({.tau = 0, .load_cap = 0, .tie_break = "lowest-index"});
  std::vector<WorkerView> workers = workers_with({0, 2, 5, 2});
  for (const int32_t none : {3, -1}) {  // beyond the model's rows is no cohort either
    workers[3].cohort = none;
    auto decision = policy->choose({workers, &cohorts}, {.counts = &counts, .model_fingerprint = "f"});
    EXPECT_EQ(decision->worker, 1U);  // as loaded as the newcomer: the cohort wins
    EXPECT_EQ(decision->reason, Reason::kBand);
    EXPECT_EQ(decision->fallback, FallbackReason::kNone);
    EXPECT_EQ(decision->scores[3], kNoScore);
    workers[3].load = 1;
    decision = policy->choose({workers, &cohorts}, {.counts = &counts});
    EXPECT_EQ(decision->worker, 3U);
    EXPECT_EQ(decision->reason, Reason::kNoCohort);
    EXPECT_EQ(decision->candidates, (std::vector<uint32_t>{3}));
    workers[3].load = 2;
  }
  // When all that have a cohort are over the cap, whoever is left takes it.
  const auto capped = made({.tau = 0, .load_cap = 1});
  workers = workers_with({9, 9, 9, 0});
  workers[3].cohort = -1;
  const auto decision = capped->choose({workers, &cohorts}, {.counts = &counts});
  EXPECT_EQ(decision->worker, 3U);
  EXPECT_EQ(decision->capped, 3U);
}

TEST(LocalityBandPolicy, EveryReasonHasItsOwnLabel) {
  std::set<std::string_view> labels;
  for (size_t r = 0; r < kFallbackReasons; ++r) labels.insert(to_string(static_cast<FallbackReason>(r)));
  EXPECT_EQ(labels.size(), kFallbackReasons);
  EXPECT_FALSE(labels.contains(""));
}

}  // namespace
}  // namespace kindred::policy
