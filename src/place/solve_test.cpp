#include "place/solve.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "place/calibrate.h"
#include "place/explain.h"
#include "place/generate.h"
#include "place/settle.h"
#include "place/solvers.h"

namespace kindred::place {
namespace {

Solution solved(const Problem& problem, Solver solver) {
  Result<Solution> solution = solve(problem, solver);
  EXPECT_TRUE(solution.ok()) << to_string(solver) << ": " << solution.error().message;
  return solution ? *std::move(solution) : Solution{};
}

double objective(const Problem& problem, const Placement& placement) {
  return total(evaluate(problem, placement)).objective;
}

TEST(solve, names) {
  for (const Solver solver : kSolvers) EXPECT_EQ(*parse_solver(to_string(solver)), solver);
  const Result<Solver> unknown = parse_solver("annealing");
  ASSERT_FALSE(unknown.ok());
  EXPECT_NE(unknown.error().message.find("sem-moe"), std::string::npos);
}

// Every solver, every kind of traffic: a placement that passes its own check (solve() sees to that), twice the same.
TEST(solve, all_solvers_on_all_kinds) {
  for (const TrafficKind kind : kTrafficKinds) {
    for (const uint32_t redundant : {0U, 8U}) {
      Problem problem = generate_problem(kind, {.layers = 2, .experts = 16}, 4, 7);
      problem.redundant = redundant;
      if (redundant > 0) problem.old = {};
      for (const Solver solver : kSolvers) {
        if (solver == Solver::kExact) continue;
        SCOPED_TRACE(std::string(to_string(kind)) + ", " + std::string(to_string(solver)));
        EXPECT_EQ(solved(problem, solver).placement, solved(problem, solver).placement);
      }
    }
  }
}

TEST(solve, flow_is_never_worse_than_the_others) {
  for (const TrafficKind kind : kTrafficKinds) {
    for (uint64_t seed = 1; seed <= 4; ++seed) {
      const Problem problem = generate_problem(kind, {.layers = 2, .sources = 4, .experts = 32}, 8, seed);
      const Solution flow = solved(problem, Solver::kFlow);
      const double reached = objective(problem, flow.placement);
      for (const Solver solver :
           {Solver::kLinear, Solver::kRoundRobin, Solver::kEplb, Solver::kGreedy, Solver::kMoetuner, Solver::kSemMoe}) {
        EXPECT_LE(reached, objective(problem, solved(problem, solver).placement) * (1 + 1e-9))
            << to_string(kind) << " " << to_string(solver);
      }
      const double bound = std::accumulate(flow.bound.begin(), flow.bound.end(), 0.0);
      EXPECT_LE(bound, reached * (1 + 1e-9));
      EXPECT_LE(bound, objective(problem, place_greedy(problem)) * (1 + 1e-9));
    }
  }
}

// All placements of 6 experts on 3 ranks.
TEST(solve, flow_finds_the_optimum_of_small_problems) {
  for (uint64_t seed = 1; seed <= 30; ++seed) {
    const TrafficKind kind = kTrafficKinds[seed % kTrafficKinds.size()];
    Problem problem = generate_problem(kind, {.sources = 3, .experts = 6}, 3, seed);
    problem.weights = {.alpha = 1, .beta = 0.4, .gamma = 20};
    Placement trial = problem.old;
    double least = objective(problem, trial);
    while (std::next_permutation(trial.rank.begin(), trial.rank.end())) {
      least = std::min(least, objective(problem, trial));
    }
    EXPECT_NEAR(objective(problem, solved(problem, Solver::kFlow).placement), least, 1e-9 * least) << "seed " << seed;
  }
}

TEST(solve, flow_keeps_load_caps_or_says_so) {
  for (const TrafficKind kind : {TrafficKind::kAffinity, TrafficKind::kZipf}) {
    for (uint64_t seed = 1; seed <= 20; ++seed) {
      for (const double cap : {1.05, 1.3, 2.0}) {
        Problem problem = generate_problem(kind, {.layers = 2, .experts = 32}, 4, seed);
        problem.load_cap = cap;
        const Result<Solution> solution = solve(problem, Solver::kFlow);
        if (!solution) {  // one of Zipf's experts alone may be too much
          EXPECT_EQ(solution.error().field, "load_cap");
          EXPECT_EQ(kind, TrafficKind::kZipf);
          EXPECT_LT(cap, 2);
          continue;
        }
        for (const Cost& cost : evaluate(problem, solution->placement)) EXPECT_LE(cost.max_over_mean(), cap + 1e-9);
      }
    }
  }
  Problem impossible = generate_problem(TrafficKind::kAffinity, {.experts = 4}, 4, 1);
  impossible.load_cap = 1;
  EXPECT_FALSE(solve(impossible, Solver::kFlow).ok());
}

TEST(solve, copies_go_to_the_sources) {
  // Two sources use expert 0 alike; with a slot more on each rank both have it at home.
  Problem problem = generate_problem(TrafficKind::kAffinity, {.experts = 4}, 2, 1);
  problem.old = {};
  problem.redundant = 2;
  problem.traffic.tokens = {100, 50, 3,  4,    // source 0: experts 0 and 1
                            100, 2,  60, 70};  // source 1: experts 0, 2 and 3
  const Placement placement = solved(problem, Solver::kFlow).placement;
  const std::vector<std::vector<uint32_t>> holders = placement.holders(0);
  EXPECT_EQ(holders[0], (std::vector<uint32_t>{0, 1}));
  EXPECT_EQ(holders[1], (std::vector<uint32_t>{0}));
  EXPECT_LE(total(evaluate(problem, placement)).remote_tokens, 2 + 3 + 4);
}

TEST(solve, copies_help_flow_more_than_eplb) {
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    Problem problem = generate_problem(TrafficKind::kZipf, {.layers = 2, .sources = 4, .experts = 32}, 4, seed);
    const double without = total(evaluate(problem, solved(problem, Solver::kFlow).placement)).communication;
    problem.old = {};
    problem.redundant = 8;
    const Cost flow = total(evaluate(problem, solved(problem, Solver::kFlow).placement));
    const Cost eplb = total(evaluate(problem, solved(problem, Solver::kEplb).placement));
    EXPECT_LT(flow.objective, eplb.objective);
    EXPECT_LT(flow.communication, without);
  }
}

TEST(solve, copies_with_one_source_balance) {
  // Nothing to save on the way: copies take load from the hottest.
  Problem problem = generate_problem(TrafficKind::kHot, {.layers = 1, .sources = 1, .experts = 16}, 4, 2);
  const double without = total(evaluate(problem, solved(problem, Solver::kFlow).placement)).max_over_mean();
  problem.old = {};
  problem.redundant = 8;
  const double with = total(evaluate(problem, solved(problem, Solver::kFlow).placement)).max_over_mean();
  EXPECT_LT(with, without);
  EXPECT_LT(with, 1.05);
}

TEST(solve, greedy_by_hand) {
  // Hottest first: expert 2 (14) to its source's rank, then 0 (11), 3 (9), 1 (8).
  Problem problem = generate_problem(TrafficKind::kAffinity, {.experts = 4}, 2, 1);
  problem.traffic.tokens = {10, 0, 0, 9, 1, 8, 14, 0};
  problem.weights = {.alpha = 1, .beta = 0, .gamma = 0};
  EXPECT_EQ(solved(problem, Solver::kGreedy).placement.rank, (std::vector<uint32_t>{0, 1, 1, 0}));
  problem.weights.gamma = 100;  // stay
  EXPECT_EQ(solved(problem, Solver::kGreedy).placement.rank, problem.old.rank);
  problem.weights = {.alpha = 0, .beta = 1, .gamma = 0};  // ties: no migration; then balance
  EXPECT_EQ(solved(problem, Solver::kGreedy).placement.rank, (std::vector<uint32_t>{0, 1, 1, 0}));
}

TEST(solve, moetuner_keeps_chains_together) {
  // Expert e of a layer is always followed by expert 3 - e of the next.
  Problem problem = generate_problem(TrafficKind::kBalancedSources, {.layers = 3, .experts = 4}, 2, 1);
  problem.transitions.assign(2 * 16, 0.0F);
  for (size_t l = 0; l < 2; ++l) {
    for (size_t e = 0; e < 4; ++e) problem.transitions[l * 16 + e * 4 + (3 - e)] = 1000;
  }
  const Placement placement = solved(problem, Solver::kMoetuner).placement;
  for (size_t l = 0; l < 2; ++l) {
    for (size_t e = 0; e < 4; ++e) EXPECT_EQ(placement.layer(l)[e], placement.layer(l + 1)[3 - e]) << l << " " << e;
  }
}

TEST(solve, sem_moe_groups_by_class) {
  Problem problem = generate_problem(TrafficKind::kAffinity, {.experts = 4}, 2, 1);
  problem.traffic.tokens = {9, 1, 9, 1, 1, 9, 1, 9};
  EXPECT_EQ(solved(problem, Solver::kSemMoe).placement.rank, (std::vector<uint32_t>{0, 1, 0, 1}));
}

TEST(solve, exact_refuses_what_it_cannot_do) {
  Problem problem = generate_problem(TrafficKind::kAffinity, {.experts = 4}, 2, 1);
  problem.redundant = 2;
  problem.old = {};
  EXPECT_FALSE(solve(problem, Solver::kExact).ok());
  if (!has_exact()) {
    problem.redundant = 0;
    const Result<Solution> none = solve(problem, Solver::kExact);
    ASSERT_FALSE(none.ok());
    EXPECT_EQ(none.error().code, ErrorCode::kUnavailable);
  }
}

TEST(solve, exact_keeps_caps) {
  if (!has_exact()) GTEST_SKIP() << "built without HiGHS";
  Problem problem = generate_problem(TrafficKind::kZipf, {.experts = 8}, 4, 3);
  const double free_load = total(evaluate(problem, solved(problem, Solver::kExact).placement)).max_over_mean();
  problem.load_cap = 1;
  const Result<Solution> refused = solve(problem, Solver::kExact);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().field, "load_cap");
  problem.load_cap = free_load * 1.001;
  EXPECT_LE(total(evaluate(problem, solved(problem, Solver::kExact).placement)).max_over_mean(), problem.load_cap);
}

TEST(settle, a_ring_of_equals) {
  // All rows want rank 0, all loads are equal: any assignment costs the same but for two rows.
  const std::vector<double> cost = {0, 1, 0, 1, 0, 2, 0, 2}, load(4, 1.0);
  const Settled settled = Settler().settle({.cost = cost, .load = load, .ranks = 2, .beta = 1});
  EXPECT_EQ(settled.objective, 2);
  EXPECT_NEAR(settled.bound, 2, 1e-6);
  EXPECT_LE(settled.bound, 2);
  EXPECT_EQ(settled.rank, (std::vector<uint32_t>{1, 1, 0, 0}));
}

TEST(explain, names_the_source) {
  Problem problem = generate_problem(TrafficKind::kAffinity, {.experts = 4}, 2, 1);
  problem.traffic.tokens = {0, 9, 50, 0, 70, 0, 0, 9};  // 0 and 2 are at the wrong place
  const Placement placement = solved(problem, Solver::kFlow).placement;
  const std::vector<MoveReason> moves = explain_moves(problem, placement, 10);
  ASSERT_EQ(moves.size(), 2U);
  EXPECT_EQ(moves[0].expert, 0U);
  EXPECT_EQ(moves[0].main_source, 1U);
  EXPECT_EQ(moves[0].saved_communication, 70);
  EXPECT_NE(to_sentence(moves[0], "code").find("70 of its 70 tokens come from 'code', which saves 70"),
            std::string::npos)
      << to_sentence(moves[0], "code");
  EXPECT_EQ(explain_moves(problem, placement, 1).size(), 1U);
}

TEST(calibrate, the_reference_keeps_itself) {
  const Problem problem = generate_problem(TrafficKind::kAffinity, {.layers = 2, .experts = 16}, 4, 5);
  const Placement greedy = place_greedy(problem);
  const std::vector<double> betas = {0, 0.0025, 1}, gammas = {0, 1};
  const auto points = calibrate_greedy(problem, greedy, betas, gammas);
  ASSERT_TRUE(points.ok());
  ASSERT_EQ(points->size(), 6U);
  const CalibrationPoint& same = (*points)[3];
  EXPECT_EQ(same.weights.beta, 0.0025);
  EXPECT_EQ(same.kept, 1);
  EXPECT_EQ(same.communication_gap, 0);
  EXPECT_LE(best_point(*points).cost.objective, same.cost.objective);
  EXPECT_LE((*points)[0].kept, (*points)[0].kept_source);
}

}  // namespace
}  // namespace kindred::place
