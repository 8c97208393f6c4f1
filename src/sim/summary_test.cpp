#include "sim/summary.h"

#include <gtest/gtest.h>

#include "sim/cluster_testing.h"
#include "sim/cohort_fit.h"

namespace kindred::sim {
namespace {

using testing::TestModel;

SimResult small_run(std::vector<SimRequest> requests, size_t steps = 0) {
  LinearCost cost;
  cost.host_s = 0.01;
  cost.kv_token_s = 1e-5;
  ClusterOptions options = testing::pd(1, 1, cost);
  options.step_records = steps;
  Result<SimResult> run = run_cluster(options, requests);
  EXPECT_TRUE(run) << run.error().message;
  return *std::move(run);
}

TEST(Summary, Quantiles) {
  EXPECT_EQ(spread_of({}).p99, 0);
  std::vector<double> values;
  for (int i = 100; i >= 1; --i) values.push_back(i);
  const Spread spread = spread_of(values);
  EXPECT_DOUBLE_EQ(spread.mean, 50.5);
  EXPECT_DOUBLE_EQ(spread.p50, 50);
  EXPECT_DOUBLE_EQ(spread.p90, 90);
  EXPECT_DOUBLE_EQ(spread.p99, 99);
  EXPECT_DOUBLE_EQ(spread_of({3}).p50, 3);
}

TEST(Summary, OfARunThatCanBeWorkedOut) {
  const TestModel model;
  const SimResult run = small_run({model.request(1, 100, 5), model.request(2, 100, 1)});
  const Summary summary = summarize(run);
  EXPECT_EQ(summary.requests, 2U);
  EXPECT_EQ(summary.ended[0], 2U);
  EXPECT_NEAR(summary.ttft_s.mean, 0.01, 1e-9);
  EXPECT_NEAR(summary.tpot_s.mean, (0.001 + 4 * 0.01) / 4, 1e-9);
  EXPECT_NEAR(summary.handoff_s.mean, 0.001, 1e-9);
  EXPECT_NEAR(summary.duration_s, 1.01, 1e-9);
  EXPECT_NEAR(summary.output_tokens_per_s, 6 / 1.01, 1e-6);
  EXPECT_NEAR(summary.decode_batch, 1, 1e-12);
  EXPECT_NEAR(summary.active_experts, 2, 1e-12);
  EXPECT_NEAR(summary.decode_step_s, 0.01, 1e-9);
  EXPECT_NEAR(summary.decode.busy, 0.04 / 2.01, 1e-6);
  EXPECT_EQ(summarize(run, 1.5).requests, 1U);
  EXPECT_EQ(to_json(summary)["ended"]["ok"], 2);
}

TEST(Summary, ALineARequest) {
  const TestModel model;
  const SimResult run = small_run({model.request(1, 100, 5), model.request(2, 100, 1)});
  const std::vector<std::string> domains = {"code, mostly"};
  const std::string csv = requests_csv(run, domains);
  EXPECT_NE(csv.find("\n0,1.000000000,1.010000000,1.051000000,1.010000000,1.011000000,100,5,5,\"code, mostly\","
                     "prefill-0,decode-0,0,ok\n"),
            std::string::npos)
      << csv;
  EXPECT_NE(csv.find("\n1,2.000000000,2.010000000,2.010000000,,,100,1,1,\"code, mostly\",prefill-0,,0,ok\n"),
            std::string::npos)
      << csv;
}

TEST(Summary, ATraceIsJson) {
  const TestModel model;
  const SimResult run = small_run({model.request(1, 100, 5)}, 3);
  EXPECT_EQ(run.steps.size(), 3U);
  const Json trace = Json::parse(steps_trace(run));
  size_t steps = 0, begun = 0, over = 0;
  for (const Json& event : trace["traceEvents"]) {
    steps += event["ph"] == "X" ? 1 : 0;
    begun += event["ph"] == "b" ? 1 : 0;
    over += event["ph"] == "e" ? 1 : 0;
  }
  EXPECT_EQ(steps, 3U);
  EXPECT_EQ(begun, 3U);
  EXPECT_EQ(over, 3U);
}

// Two domains with experts of their own: each gets its cohort, and the band keeps them apart.
TEST(CohortFit, LocalityKeepsDomainsApart) {
  const expert::ExpertShape shape = testing::small_shape(4, 32, 2);
  Rng rng(5);
  std::vector<std::shared_ptr<const ExpertTape>> tapes;
  for (uint32_t d = 0; d < 2; ++d) {
    ExpertTape tape(shape, 512);
    for (uint32_t t = 0; t < 512; ++t) {
      for (uint32_t l = 0; l < 4; ++l) {
        const auto one = static_cast<uint32_t>(rng.below(16)), other = static_cast<uint32_t>(rng.below(15));
        tape.set(t, l, 16 * d + one);
        tape.set(t, l, 16 * d + (other >= one ? other + 1 : other));
      }
    }
    tapes.push_back(std::make_shared<const ExpertTape>(tape));
  }
  const auto draw = [&](uint32_t domain) {
    auto counts = std::make_shared<expert::ExpertCounts>(shape);
    const auto first = static_cast<uint32_t>(rng.below(512));
    counts->tokens = 100;
    for (uint32_t t = 0; t < 100; ++t) {
      const auto row = tapes[domain]->token((first + t) % 512);
      for (uint32_t l = 0; l < 4; ++l) {
        for (uint32_t e = 0; e < 32; ++e) counts->data[l * 32 + e] += row[l] >> e & 1;
      }
    }
    return RequestExperts{.prompt = counts, .decode = tapes[domain], .first = (first + 100) % 512, .domain = domain};
  };
  std::vector<CalibrationRequest> calibration;
  for (uint32_t i = 0; i < 64; ++i) calibration.push_back({.experts = draw(i % 2), .decode_tokens = 50});
  const Result<expert::Activations> recorded = record_activations(calibration);
  ASSERT_TRUE(recorded) << recorded.error().message;
  EXPECT_TRUE(recorded->check().ok());
  const Result<FittedCohorts> fitted = fit_for(*recorded, 2, 1);
  ASSERT_TRUE(fitted) << fitted.error().message;
  EXPECT_LT(fitted->active_experts, 0.85 * fitted->active_random);

  LinearCost cost;
  cost.host_s = 0.01;
  ClusterOptions options = testing::pd(1, 2, cost);
  std::vector<SimRequest> requests;
  for (uint32_t i = 0; i < 200; ++i) {
    requests.push_back({.arrival_s = 0.02 * i, .prompt_tokens = 100, .output_tokens = 50, .experts = draw(i % 2)});
  }
  const auto experts_with = [&](const char* policy) {
    options.router.decode.name = policy;
    options.router.decode.tau = 0;
    options.router.cohorts = fitted->model;
    const Result<SimResult> run = run_cluster(options, requests);
    EXPECT_TRUE(run);
    EXPECT_EQ(run->fallbacks[0], 200U);
    return summarize(*run).active_experts;
  };
  EXPECT_LT(experts_with("locality-band"), 0.8 * experts_with("random"));
}

}  // namespace
}  // namespace kindred::sim
