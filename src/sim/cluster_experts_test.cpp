// Expert ranks by the copy: what a placement costs, and experts that move.

#include <gtest/gtest.h>

#include <algorithm>

#include "sim/cluster_testing.h"
#include "sim/expert_process.h"

namespace kindred::sim {
namespace {

// What ranks do is all that costs: the busiest rank of each layer, and the busiest link.
struct RankCost final : StepCost {
  double step_s(const StepShape& shape) const override {
    double copies = 0, link = 0;
    for (size_t at = 0; at < shape.rank_copies.size(); at += shape.ranks) {
      copies += *std::ranges::max_element(shape.rank_copies.subspan(at, shape.ranks));
    }
    for (const float carried : shape.link_copies) link += carried;
    return 1e-3 + copy_s * copies + link_s * link;
  }
  double kv_transfer_s(double) const override { return 0; }

  double copy_s = 1e-5, link_s = 5e-5;
};

class ClusterExperts : public ::testing::Test {
 protected:
  // Two engines with two ranks each.
  static ClusterOptions cluster(const std::string& policy, std::optional<PlacementControlOptions> control) {
    ClusterOptions options;
    options.groups = {testing::group(Role::kBoth, 1, {})};
    WorkerGroup& group = options.groups[0];
    group.cost = std::make_shared<RankCost>();
    group.engines = 2;
    group.ranks = 4;
    group.engine.kv.cache = false;
    group.expert_parallel = ExpertParallel{.control = std::move(control)};
    options.router.engine = policy::EnginePolicyOptions{.name = policy};
    return options;
  }
  static PlacementControlOptions greedy(bool hysteresis = false) {
    PlacementControlOptions out;
    out.rebalance.solver = place::Solver::kGreedy;
    out.rebalance.windows = 2;
    out.rebalance.migration.windows = 4;
    out.hysteresis = hysteresis;
    out.window_s = 2;
    out.first_stall_s = 0.2;
    out.later_stall_s = 0.1;
    return out;
  }
  // Of two domains; `apart`: each engine gets one of them.
  static std::vector<SimRequest> load(bool apart, bool uniform = false) {
    SyntheticOptions options = calibrated_synthetic(testing::small_shape(4, 32, 4));
    options.domains = {"a", "b"};
    if (uniform) options.base = options.domain = options.request = options.drift = options.phase = 0;
    auto process = make_synthetic(options);
    KINDRED_CHECK(process.ok());
    std::vector<SimRequest> out;
    for (const double at_s : testing::poisson_arrivals(20, 300, 3)) {
      TraceRequest like;
      like.prompt_tokens = 50 + 37 * (out.size() % 11);
      like.output_tokens = 30;
      like.domain = static_cast<int32_t>(out.size() % 2);
      out.push_back({.arrival_s = at_s,
                     .prompt_tokens = like.prompt_tokens,
                     .output_tokens = like.output_tokens,
                     .experts = (*process)->experts(like, out.size())});
      if (apart) out.back().assigned = like.domain;
    }
    return out;
  }
  static SimResult run(const ClusterOptions& options, std::span<const SimRequest> requests) {
    Result<SimResult> out = run_cluster(options, requests);
    KINDRED_CHECK(out.ok());
    EXPECT_EQ(out->ledger_left, 0);
    return *std::move(out);
  }
  static double total_s(const SimResult& result) {
    double sum = 0;
    for (const RequestRecord& record : result.requests) sum += static_cast<double>(record.last_ns - record.arrival_ns);
    return sum * 1e-9 / static_cast<double>(result.requests.size());
  }
};

TEST_F(ClusterExperts, FollowTheirTraffic) {
  const auto requests = load(/*apart=*/true);
  const SimResult stay = run(cluster("replay", std::nullopt), requests);
  const SimResult move = run(cluster("replay", greedy()), requests);
  const ExpertReport& report = move.workers[0].experts;
  EXPECT_NEAR(stay.workers[0].experts.remote_share(), 0.5, 0.06);
  EXPECT_LT(report.remote_share(), 0.3);
  EXPECT_LT(total_s(move), 0.95 * total_s(stay));
  EXPECT_GE(report.migrations, 2U);
  EXPECT_NEAR(report.stalled_s, 0.2 + 0.1 * static_cast<double>(report.migrations - 1), 1e-9);
  EXPECT_EQ(report.copies, stay.workers[0].experts.copies);  // what tokens use does not depend on where it is
  EXPECT_EQ(stay.workers[0].experts.migrations, 0U);
}

TEST_F(ClusterExperts, HysteresisMovesLess) {
  const auto requests = load(true);
  const auto eager = run(cluster("replay", greedy()), requests).workers[0].experts;
  PlacementControlOptions paying = greedy(true);
  paying.rebalance.migration.link_bytes_per_s = 1e5;  // links are slow, so it pays
  paying.rebalance.migration.expert_bytes = 10;
  const auto patient = run(cluster("replay", paying), requests).workers[0].experts;
  EXPECT_GE(patient.migrations, 1U);
  EXPECT_LT(patient.migrations, eager.migrations);
  EXPECT_LT(patient.remote_share(), 0.4);
}

TEST_F(ClusterExperts, NothingIsToBeGainedWhereAllExpertsAreAlike) {
  const auto requests = load(true, /*uniform=*/true);
  const SimResult stay = run(cluster("replay", std::nullopt), requests);
  const SimResult move = run(cluster("replay", greedy()), requests);
  EXPECT_NEAR(move.workers[0].experts.remote_share(), 0.5, 0.02);
  EXPECT_GT(total_s(move), 0.99 * total_s(stay));
}

TEST_F(ClusterExperts, FeedbackOffIsPressureWithoutItsExpertTerm) {
  const auto requests = load(false);
  ClusterOptions with = cluster("pressure", greedy());
  with.router.engine->pressure.expert_weight = 1e5;
  ClusterOptions silent = with, deaf = with;
  silent.groups[0].expert_parallel->feedback = false;
  deaf.router.engine->pressure.experts = false;
  const auto engines = [&](const ClusterOptions& options) {
    std::vector<uint32_t> out;
    for (const RequestRecord& record : run(options, requests).requests) out.push_back(record.engine);
    return out;
  };
  EXPECT_EQ(engines(silent), engines(deaf));
  EXPECT_NE(engines(silent), engines(with));
  EXPECT_EQ(engines(with), engines(with));
}

TEST_F(ClusterExperts, BadInputIsRefused) {
  const auto requests = load(false);
  const auto field = [&](const ClusterOptions& options) {
    const auto out = run_cluster(options, requests);
    return out ? std::string("none") : out.error().field;
  };
  ClusterOptions one = cluster("pressure", std::nullopt);
  one.groups[0].ranks = 1;
  EXPECT_EQ(field(one), "ranks");
  ClusterOptions window = cluster("pressure", greedy());
  window.groups[0].expert_parallel->control->window_s = 0;
  EXPECT_EQ(field(window), "window_s");
  ClusterOptions other = cluster("pressure", std::nullopt);
  other.groups[0].expert_parallel->at_first = std::make_shared<place::Placement>();
  EXPECT_EQ(field(other), "at_first");
}

}  // namespace
}  // namespace kindred::sim
