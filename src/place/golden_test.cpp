// DeepSeek's EPLB and proven optima, from tests/data/golden. Tolerances are those of its README.
#include "base/golden_files.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "base/json.h"
#include "place/eplb.h"
#include "place/solve.h"
#include "place/testing.h"

namespace kindred::place {
namespace {

std::vector<uint32_t> slots_of_expert(std::span<const uint32_t> expert_of, uint32_t expert) {
  std::vector<uint32_t> slots;
  for (uint32_t slot = 0; slot < expert_of.size(); ++slot) {
    if (expert_of[slot] == expert) slots.push_back(slot);
  }
  return slots;
}

void check_rank_loads(const Json& golden, size_t l, const EplbLayer& layer, std::span<const double> load) {
  const size_t ranks = golden["num_gpus"], slots = layer.expert_of.size() / ranks;
  double most = 0, sum = 0;
  for (size_t r = 0; r < ranks; ++r) {
    double on_rank = 0;
    for (size_t i = 0; i < slots; ++i) {
      const uint32_t e = layer.expert_of[r * slots + i];
      on_rank += load[e] / layer.copies[e];
    }
    most = std::max(most, on_rank);
    sum += on_rank;
  }
  EXPECT_NEAR(most, golden["gpu_load_max"][l].get<double>(), 1e-5 * std::max(1.0, most));
  EXPECT_NEAR(sum / static_cast<double>(ranks), golden["gpu_load_mean"][l].get<double>(), 1e-5 * std::max(1.0, sum));
}

TEST(golden, eplb) {
  for_each_golden("eplb_", [](const Json& golden) {
    const EplbShape shape{.replicas = golden["num_replicas"],
                          .groups = golden["num_groups"],
                          .nodes = golden["num_nodes"],
                          .ranks = golden["num_gpus"]};
    const bool exact = golden["same_with_stable_float64"];
    for (size_t l = 0; l < golden["L"].get<size_t>(); ++l) {
      SCOPED_TRACE(l);
      const auto load = golden["weights"][l].get<std::vector<double>>();
      const Result<EplbLayer> layer = eplb_layer(load, shape);
      ASSERT_TRUE(layer.ok()) << layer.error().message;
      const Json& slots = golden[exact ? "phy2log" : "phy2log_stable_f64"][l];
      EXPECT_EQ(layer->expert_of, slots.get<std::vector<uint32_t>>());
      EXPECT_EQ(layer->copies, golden[exact ? "logcnt" : "logcnt_stable_f64"][l].get<std::vector<uint32_t>>());
      check_rank_loads(golden, l, *layer, load);
      if (!exact) continue;
      for (uint32_t e = 0; e < load.size(); ++e) {  // log2phy, each row as a set
        std::vector<int64_t> expected = golden["log2phy"][l * load.size() + e].get<std::vector<int64_t>>();
        std::erase(expected, -1);
        std::sort(expected.begin(), expected.end());
        const std::vector<uint32_t> got = slots_of_expert(layer->expert_of, e);
        EXPECT_TRUE(std::equal(got.begin(), got.end(), expected.begin(), expected.end())) << "expert " << e;
      }
    }
  });
}

TEST(golden, placement_objective) {
  for_each_golden("placement_milp_", [](const Json& golden) {
    Problem problem = problem_of_golden(golden);
    Placement optimal = problem.old;
    optimal.rank = flat<uint32_t>(golden["an_optimal_rank"]);
    const std::vector<Cost> best = evaluate(problem, optimal), stay = evaluate(problem, problem.old);
    for (size_t l = 0; l < problem.traffic.layers; ++l) {
      const double expected = golden["optimal_objective"][l];
      EXPECT_NEAR(best[l].objective, expected, 1e-8 * expected);
      EXPECT_NEAR(best[l].communication, golden["comm"][l].get<double>(), 1e-6);
      EXPECT_NEAR(best[l].imbalance, golden["imbalance"][l].get<double>(), 1e-6);
      EXPECT_EQ(best[l].moves, golden["moved"][l].get<double>());
      EXPECT_NEAR(stay[l].objective, golden["stay_objective"][l].get<double>(), 1e-8 * stay[l].objective);
    }
    const std::vector<double> loads = rank_loads(problem, optimal);
    EXPECT_EQ(loads, flat<double>(golden["rank_load"]));
  });
}

void check_against_optimum(const Json& golden, const Problem& problem, const Solution& solution, double within) {
  const std::vector<Cost> costs = evaluate(problem, solution.placement);
  for (size_t l = 0; l < costs.size(); ++l) {
    const double optimum = golden["optimal_objective"][l];
    EXPECT_GE(costs[l].objective, optimum - 1e-8 * optimum - 6e-4) << "layer " << l;
    EXPECT_LE(costs[l].objective, optimum * (1 + within)) << "layer " << l;
    ASSERT_EQ(solution.bound.size(), costs.size());
    EXPECT_LE(solution.bound[l], optimum * (1 + 1e-8)) << "layer " << l;
  }
}

TEST(golden, placement_flow) {
  for_each_golden("placement_milp_", [](const Json& golden) {
    const Problem problem = problem_of_golden(golden);
    const Result<Solution> solution = solve(problem, Solver::kFlow);
    ASSERT_TRUE(solution.ok()) << solution.error().message;
    check_against_optimum(golden, problem, *solution, 0.001);
  });
}

// Those that HiGHS proves in well under a second.
TEST(golden, placement_exact) {
  if (!has_exact()) GTEST_SKIP() << "built without HiGHS";
  for_each_golden("placement_milp_", [](const Json& golden) {
    for (const Json& seconds : golden["solve_seconds"]) {
      if (seconds.get<double>() > 0.2) return;
    }
    const Problem problem = problem_of_golden(golden);
    const Result<Solution> solution = solve(problem, Solver::kExact, {.time_limit_s = 60});
    ASSERT_TRUE(solution.ok()) << solution.error().message;
    check_against_optimum(golden, problem, *solution, 1e-8);
    for (size_t l = 0; l < problem.traffic.layers; ++l) {
      const double optimum = golden["optimal_objective"][l];
      EXPECT_NEAR(solution->bound[l], optimum, 1e-8 * optimum + 1e-5) << "layer " << l;
    }
  });
}

}  // namespace
}  // namespace kindred::place
