#include <gtest/gtest.h>

#include <optional>

#include "reproduce/gimbal_run.h"
#include "sim/trace_reader.h"

namespace kindred::reproduce {
namespace {

// Small runs; figures are the command's business.
class Gimbal : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    auto profile = sim::load_profile(KINDRED_SOURCE_DIR "/profiles/h100-qwen3-30b-a3b.json");
    auto trace = sim::read_trace(KINDRED_SOURCE_DIR "/data/traces/azure_2023_conv.csv.xz");
    KINDRED_CHECK(profile.ok() && trace.ok());
    profile_ = *std::move(profile);
    trace_ = *std::move(trace);
    skewed_ = workload();
  }
  static GimbalSetup setup() {
    GimbalSetup out{.profile = *profile_};
    out.law.all = 6;
    out.window_s = 5;
    out.first_stall_s = out.later_stall_s = 0;
    return out;
  }
  static GimbalWorkload workload(double skew = 1) {
    GimbalTrafficOptions options{.requests = 90, .domains = 2};
    options.skew = skew;
    auto traffic = GimbalTraffic::make(*profile_, *trace_, options);
    KINDRED_CHECK(traffic.ok());
    auto drawn = (*traffic)->draw(sim::LengthMix::kRandom, 7);
    KINDRED_CHECK(drawn.ok());
    return *std::move(drawn);
  }
  static GimbalCell cell(const GimbalSetup& setup, const GimbalWorkload& workload, std::string_view arm) {
    auto out = run_gimbal_cell(setup, workload, 4, arm);
    KINDRED_CHECK(out.ok());
    return *out;
  }

  inline static std::optional<sim::Profile> profile_;
  inline static std::optional<sim::Trace> trace_;
  inline static std::optional<GimbalWorkload> skewed_;
};

TEST_F(Gimbal, WhereAllExpertsAreAlikePlacementGainsNothing) {
  const GimbalWorkload alike = workload(0);
  const GimbalCell vllm = cell(setup(), alike, "vllm"), ep = cell(setup(), alike, "ep");
  EXPECT_NEAR(ep.tpot_s / vllm.tpot_s, 1, 0.01);
  EXPECT_NEAR(vllm.remote_share, 0.5, 0.02);
}

TEST_F(Gimbal, SourcesThatDifferAreWorthPlacingBy) {
  GimbalSetup by_domain = setup();
  by_domain.by_domain = 1;
  by_domain.law.links = 20;
  const GimbalCell vllm = cell(by_domain, *skewed_, "vllm"), ep = cell(by_domain, *skewed_, "ep");
  EXPECT_LT(ep.remote_share, vllm.remote_share - 0.1);
  EXPECT_LT(ep.tpot_s, vllm.tpot_s);
}

TEST_F(Gimbal, FeedbackIsAllThatBothAndGimbalDifferIn) {
  const GimbalWorkload& work = *skewed_;
  GimbalSetup deaf = setup();
  deaf.expert_weight = 0;
  GimbalCell both = cell(deaf, work, "both"), gimbal = cell(deaf, work, "gimbal"), again = cell(deaf, work, "gimbal");
  for (size_t i = 0; i < GimbalCell::kCount; ++i) {
    EXPECT_EQ(*both.all().at(i), *gimbal.all().at(i)) << i;
    EXPECT_EQ(*again.all().at(i), *gimbal.all().at(i)) << i;
  }
  EXPECT_FALSE(run_gimbal_cell(deaf, work, 4, "nobody"));
}

TEST_F(Gimbal, TheBaselineIsFittedAndEveryoneRuns) {
  GimbalOptions options{.profile = *profile_, .trace = *trace_};
  options.baseline.running = 6;
  options.requests = 60;
  options.domains = 2;
  options.seeds = 1;
  options.rates = {4};
  options.mixes = {sim::LengthMix::kAverage};
  options.scans = false;
  options.threads = 2;
  const auto run = run_gimbal(options);
  ASSERT_TRUE(run) << run.error().message;
  EXPECT_NEAR(run->fits.at(0).baseline.running / 6, 1, 0.1);
  EXPECT_GT(run->fits[0].law.all, 1);
  EXPECT_EQ(run->results.size(), kGimbalArms.size());
  EXPECT_EQ(run->change({.arm = "vllm"}, "vllm", &GimbalCell::ttft_s), 0);
  EXPECT_GT(run->mean({.arm = "moetuner"}).tpot_s, 0);
}

}  // namespace
}  // namespace kindred::reproduce
