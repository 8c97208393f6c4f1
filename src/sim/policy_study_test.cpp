#include "sim/policy_study.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace kindred::sim {
namespace {

StudyPool small_pool() {
  const expert::ExpertShape shape{.layers = {0, 1}, .experts = 32, .top_k = 4};
  SyntheticOptions options = calibrated_synthetic(shape);
  options.prototypes = 8;
  options.tape_tokens = 64;
  auto process = make_synthetic(options);
  KINDRED_CHECK(process.ok());
  Profile profile = *load_profile(KINDRED_SOURCE_DIR "/profiles/h200-gpt-oss-20b.json");
  StudyPool pool = make_study_pool("small", **process, std::move(profile), 60);
  pool.most_output_tokens = 24;
  return pool;
}

const StudyRow& row_of(const std::vector<StudyRow>& rows, std::string_view policy) {
  const auto at = std::ranges::find(rows, policy, &StudyRow::policy);
  KINDRED_CHECK(at != rows.end());
  return *at;
}

TEST(PolicyStudy, MarginalCostReadsFewerExpertsAndIsFaster) {
  const StudyPool pool = small_pool();
  EXPECT_EQ(pool.calibrating.size(), 20U);
  EXPECT_EQ(pool.simulated.size(), 40U);
  const StudyCell cell{.workers = 4, .batch = 8, .mix = StudyMix::kSkewed};
  const std::vector<uint64_t> seeds = {1, 2};
  const auto rows = run_study_cell(pool, cell, study_policies(/*variants=*/false), seeds);
  ASSERT_TRUE(rows) << rows.error().message;
  const StudyRow& load = row_of(*rows, "least-loaded");
  const StudyRow& cost = row_of(*rows, "marginal-cost");
  const StudyRow& alone = row_of(*rows, "marginal-cost, no cohorts");
  EXPECT_NEAR(load.batch, 8, 2);  // the rate is what it says
  EXPECT_LT(cost.active_experts, load.active_experts);
  EXPECT_LT(cost.change[0], 0);
  EXPECT_LT(alone.change[0], 0);
  EXPECT_GT(cost.error[0], 0);
  for (const char* baseline : {"round-robin", "least-loaded", "power-of-two"}) {
    EXPECT_GE(row_of(*rows, baseline).change[0], 0);
  }
  const auto again = run_study_cell(pool, cell, study_policies(/*variants=*/false), seeds);
  for (size_t i = 0; i < rows->size(); ++i) EXPECT_EQ((*again)[i].tpot_s, (*rows)[i].tpot_s) << (*rows)[i].policy;
}

// What marginal-cost gains comes from whose experts are whose.
TEST(PolicyStudy, ShuffledExpertsGainNothing) {
  const StudyPool pool = small_pool();
  std::vector<StudyPolicy> policies = study_policies(/*variants=*/false);
  std::erase_if(policies, [](const StudyPolicy& policy) {
    return !policy.baseline && policy.name != "marginal-cost, no cohorts";
  });
  StudyPolicy shuffled = policies.back();
  shuffled.name = "shuffled";
  shuffled.options.shuffle_signatures = true;
  policies.push_back(shuffled);
  const std::vector<uint64_t> seeds = {1, 2};
  const auto rows = run_study_cell(pool, {.workers = 4, .batch = 8, .mix = StudyMix::kSkewed}, policies, seeds);
  ASSERT_TRUE(rows) << rows.error().message;
  const double gain = row_of(*rows, "marginal-cost, no cohorts").change[0];
  EXPECT_LT(gain, -0.005);
  EXPECT_GT(row_of(*rows, "shuffled").change[0], gain / 2);
}

TEST(PolicyStudy, UnlikeWorkersAndStaleStateRun) {
  const StudyPool pool = small_pool();
  const std::vector<uint64_t> seeds = {1};
  const StudyCell cell{.workers = 4, .batch = 4, .mix = StudyMix::kDrifting, .unlike = true, .stale = true};
  const auto rows = run_study_cell(pool, cell, study_policies(/*variants=*/true), seeds);
  ASSERT_TRUE(rows) << rows.error().message;
  for (const StudyRow& row : *rows) EXPECT_GT(row.tpot_s[0], 0) << row.policy;
  EXPECT_EQ(cell_text(cell), "4D, batch 4, drifting, unlike workers, stale");
}

}  // namespace
}  // namespace kindred::sim
