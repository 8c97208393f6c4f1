// Results that can be worked out with pencil and paper.

#include <gtest/gtest.h>

#include <algorithm>

#include "sim/cluster_testing.h"

namespace kindred::sim {
namespace {

using testing::TestModel;

TEST(ClosedForm, ASingleRequestTakesTheSumOfItsSteps) {
  const TestModel model;
  LinearCost cost;
  cost.host_s = 0.001;
  cost.prefill_token_s = 1e-5;
  cost.expert_s = 1e-4;
  cost.kv_token_s = 1e-6;
  ClusterOptions options = testing::pd(1, 1, cost);
  options.groups[0].engine.token_budget = 400;
  const std::vector<SimRequest> requests = {model.request(0.5, 1000, 11)};
  const Result<SimResult> run = run_cluster(options, requests);
  ASSERT_TRUE(run) << run.error().message;
  const RequestRecord& record = run->requests[0];
  // Chunks of 400, 400 and 200; each uses the prompt's 2 experts in both layers. A step of decode uses 2 x 2 as well.
  EXPECT_NEAR(record.ttft_s(), 3 * (0.001 + 4e-4) + 1000 * 1e-5, 1e-8);
  EXPECT_NEAR(record.tpot_s() * 10, 1000 * 1e-6 + 10 * (0.001 + 4e-4), 2e-8);
  EXPECT_EQ(record.generated, 11U);
  EXPECT_EQ(run->steps_run, 13U);
}

// The same by a measured profile: each step is what StepTime says of it.
TEST(ClosedForm, ASingleRequestByAProfile) {
  const Result<Profile> profile = load_profile(KINDRED_SOURCE_DIR "/profiles/h200-qwen3-30b-a3b.json");
  ASSERT_TRUE(profile) << profile.error().message;
  const StepTime time(*profile);
  TestModel model;
  model.shape = testing::small_shape(profile->dims.moe_layers, profile->dims.experts, profile->dims.top_k);
  Rng rng(3);
  model.tape = testing::uniform_tape(model.shape, 64, rng);
  const std::vector<SimRequest> requests = {model.request(0, 1000, 5, 7)};
  ClusterOptions options = testing::pd(1, 1, {});
  for (WorkerGroup& group : options.groups) group.cost = std::make_shared<ProfileCost>(*profile);
  options.groups[0].engine.token_budget = 600;
  const Result<SimResult> run = run_cluster(options, requests);
  ASSERT_TRUE(run) << run.error().message;
  const std::vector<uint32_t> eight(profile->dims.moe_layers, 8);  // a prompt of flat_counts, and a token
  const auto chunk_s = [&](uint32_t tokens, double contexts) {
    return time.seconds({.prefill_tokens = tokens,
                         .prefill_token_contexts = contexts,
                         .experts = eight,
                         .ranks = 1,
                         .group_tokens = tokens});
  };
  const double ttft_s = chunk_s(600, 600 * 601 / 2.0) + chunk_s(400, 400 * 600 + 400 * 401 / 2.0);
  EXPECT_NEAR(run->requests[0].ttft_s(), ttft_s, 1e-8);
  double decode_s = time.kv_transfer_s(1000, 1);
  for (int i = 1; i <= 4; ++i) {
    decode_s += time.seconds(
        {.decode_requests = 1, .decode_context_tokens = 1000.0 + i, .experts = eight, .ranks = 1, .group_tokens = 1});
  }
  EXPECT_NEAR(run->requests[0].tpot_s() * 4, decode_s, 1e-8);
}

// M/D/1: the mean wait is rho / (2 (1 - rho)) services.
TEST(ClosedForm, OneServerOneAtATimeIsAnMD1Queue) {
  const TestModel model;
  LinearCost cost;
  cost.host_s = 0.01;
  for (const double rho : {0.3, 0.6, 0.8}) {
    ClusterOptions options;
    options.groups = {testing::group(Role::kBoth, 1, cost)};
    options.groups[0].engine.max_running = 1;
    options.router.decode.name = "round-robin";
    const auto requests = testing::poisson_load(model, rho / 0.01, 100'000, 16, 1, 7);
    const Result<SimResult> run = run_cluster(options, requests);
    ASSERT_TRUE(run) << run.error().message;
    double wait_s = 0;
    for (const RequestRecord& record : run->requests) wait_s += record.ttft_s() - 0.01;
    const double mean = wait_s / 100'000, expected = 0.01 * rho / (2 * (1 - rho));
    EXPECT_NEAR(mean / expected, 1, 0.05) << rho;
  }
}

// With uniform experts a batch of n touches E (1 - (1 - k/E)^n) of a layer's experts.
TEST(ClosedForm, UniformExpertsFollowTheUnionFormula) {
  TestModel model(3, 40'000);
  model.shape = testing::small_shape(2, 64, 4);
  Rng rng(5);
  model.tape = testing::uniform_tape(model.shape, 40'000, rng);
  LinearCost cost;
  cost.host_s = 0.01;
  for (const uint32_t batch : {1U, 4U, 16U, 32U}) {
    ClusterOptions options = testing::pd(1, 1, cost);
    std::vector<SimRequest> requests;
    for (uint32_t i = 0; i < batch; ++i) requests.push_back(model.request(0, 16, 1001, i * 1201));
    const Result<SimResult> run = run_cluster(options, requests);
    ASSERT_TRUE(run) << run.error().message;
    const WorkerReport& decode = run->workers[1];
    EXPECT_EQ(decode.decode_steps, 1000U);
    EXPECT_EQ(decode.decode_tokens, 1000U * batch);
    const double expected = 64 * (1 - std::pow(1 - 4.0 / 64, batch));
    EXPECT_NEAR(decode.expert_reads / 1000, expected, 0.01 * expected) << batch;
  }
}

TEST(ClosedForm, TheRankWithTheMostSetsTheTime) {
  TestModel model;
  ExpertTape tape(model.shape, 1);
  for (uint32_t l = 0; l < 2; ++l) {
    for (const uint32_t e : {0U, 1U}) tape.set(0, l, e);  // both on the first of two ranks
  }
  model.tape = std::make_shared<const ExpertTape>(tape);
  LinearCost cost;
  cost.expert_s = 0.001;
  ClusterOptions options = testing::pd(1, 1, cost);
  options.groups[1].ranks = 2;
  const std::vector<SimRequest> requests = {model.request(0, 16, 101)};
  Result<SimResult> run = run_cluster(options, requests);
  ASSERT_TRUE(run) << run.error().message;
  EXPECT_NEAR(run->requests[0].tpot_s(), 0.004, 1e-9);
  std::vector<uint32_t> placement;
  for (uint32_t i = 0; i < 32; ++i) placement.push_back(i % 2);
  options.groups[1].placement = std::make_shared<ExpertRanks>(*ExpertRanks::make(2, 16, 2, placement));
  run = run_cluster(options, requests);
  ASSERT_TRUE(run) << run.error().message;
  EXPECT_NEAR(run->requests[0].tpot_s(), 0.002, 1e-9);
}

TEST(ClosedForm, TransfersTakeTurnsOnALink) {
  const TestModel model;
  LinearCost cost;
  cost.host_s = 1e-6;
  cost.kv_token_s = 1e-3;
  ClusterOptions options = testing::pd(1, 2, cost);
  std::vector<SimRequest> requests;
  for (int i = 0; i < 4; ++i) requests.push_back(model.request(0, 100, 2));
  const Result<SimResult> run = run_cluster(options, requests);
  ASSERT_TRUE(run) << run.error().message;
  // One prompt step for all, then 0.1 s each on the one way out, whichever worker they go to.
  std::vector<int64_t> fetched_ns;
  for (const RequestRecord& record : run->requests) fetched_ns.push_back(record.fetched_ns);
  std::ranges::sort(fetched_ns);
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_NEAR(static_cast<double>(fetched_ns[i]) * 1e-9, 0.1 * static_cast<double>(i + 1), 1e-4) << i;
  }
}

TEST(ClosedForm, EnginesOfAWorkerGoInLockstep) {
  const TestModel model;
  struct ByContext final : StepCost {
    double step_s(const StepShape& shape) const override { return 1e-3 + 1e-6 * shape.decode_context_tokens; }
    double kv_transfer_s(double) const override { return 0; }
  };
  ClusterOptions options = testing::pd(1, 1, {});
  options.groups[1].cost = std::make_shared<ByContext>();
  options.groups[1].engines = 2;
  const std::vector<SimRequest> requests = {model.request(0, 1000, 3), model.request(0, 10, 3)};
  const Result<SimResult> run = run_cluster(options, requests);
  ASSERT_TRUE(run) << run.error().message;
  // The short one waits for the long one in every step: 1,001 and 1,002 tokens of context.
  EXPECT_NEAR(run->requests[1].tpot_s(), 1e-3 + 1e-6 * (1001 + 1002) / 2, 2e-8);
  EXPECT_EQ(run->workers[1].decode_steps, 2U);
}

}  // namespace
}  // namespace kindred::sim
