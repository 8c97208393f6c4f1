#include "place/migration.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "base/rng.h"
#include "place/generate.h"
#include "place/solve.h"

namespace kindred::place {
namespace {

// Carries a plan out as a worker would, by the words of migration.h alone.
class Replay {
 public:
  Replay(const Problem& problem, const MigrationOptions& options)
      : problem_(problem), options_(options), slots_(problem.slots()) {
    for (uint32_t l = 0; l < problem.traffic.layers; ++l) {
      const auto holders = problem.old.holders(l);
      for (uint32_t e = 0; e < holders.size(); ++e) held_[{l, e}] = {holders[e].begin(), holders[e].end()};
    }
  }

  void run(const MigrationPlan& plan) {
    for (size_t i = 0; i < plan.steps.size();) {
      const size_t begin = i;
      while (i < plan.steps.size() && plan.steps[i].batch == plan.steps[begin].batch) ++i;
      batch({plan.steps.data() + begin, i - begin});
      if (::testing::Test::HasFatalFailure()) return;
    }
  }

  void expect_is(const Placement& target) const {
    for (uint32_t l = 0; l < target.layers; ++l) {
      const auto holders = target.holders(l);
      for (uint32_t e = 0; e < holders.size(); ++e) {
        EXPECT_EQ(held_.at({l, e}), std::set<uint32_t>(holders[e].begin(), holders[e].end())) << l << " " << e;
      }
    }
  }

 private:
  using Expert = std::pair<uint32_t, uint32_t>;  // layer, expert

  // All arrivals first, then what is freed.
  void batch(std::span<const MigrationStep> steps) {
    std::map<uint32_t, uint32_t> sends, receives;
    std::set<Expert> touched;
    std::vector<std::pair<Expert, uint32_t>> freed;
    const auto carry = [&](Expert expert, uint32_t from, uint32_t to, bool swap) {
      ASSERT_TRUE(held_[expert].contains(from));
      ASSERT_FALSE(held_[expert].contains(to));
      ++sends[from];
      ++receives[to];
      if (swap) held_[expert].erase(from);
      held_[expert].insert(to);
    };
    for (const MigrationStep& step : steps) {
      const Expert expert{step.layer, step.expert};
      if (step.kind == StepKind::kDrop) {
        ASSERT_FALSE(touched.contains(expert));
        freed.emplace_back(expert, step.from);
        continue;
      }
      ASSERT_TRUE(touched.insert(expert).second) << "an expert is in one step of a batch";
      carry(expert, step.from, step.to, step.kind == StepKind::kSwap);
      if (step.kind == StepKind::kMove) freed.emplace_back(expert, step.from);
      if (step.kind == StepKind::kSwap) {
        const Expert other{step.layer, step.other};
        ASSERT_TRUE(touched.insert(other).second);
        carry(other, step.to, step.from, true);
      }
    }
    for (const auto& [rank, count] : sends) ASSERT_LE(count, options_.experts_per_batch) << rank;
    for (const auto& [rank, count] : receives) ASSERT_LE(count, options_.experts_per_batch) << rank;
    expect_room();
    for (const auto& [expert, rank] : freed) {
      ASSERT_EQ(held_[expert].erase(rank), 1U);
      ASSERT_FALSE(held_[expert].empty()) << "the last copy of an expert";
    }
  }

  void expect_room() const {
    std::map<Expert, uint32_t> here;  // layer, rank
    std::map<uint32_t, uint32_t> total;
    for (const auto& [expert, ranks] : held_) {
      for (const uint32_t r : ranks) {
        ++here[{expert.first, r}];
        ++total[r];
      }
    }
    for (const auto& [where, count] : here) ASSERT_LE(count, slots_ + options_.spare_experts);
    for (const auto& [rank, count] : total) {
      ASSERT_LE(count, problem_.traffic.layers * slots_ + options_.spare_experts) << rank;
    }
  }

  const Problem& problem_;
  const MigrationOptions& options_;
  uint32_t slots_;
  std::map<Expert, std::set<uint32_t>> held_;
};

Placement shuffled(Placement placement, uint64_t seed) {
  Rng rng(seed);
  for (uint32_t l = 0; l < placement.layers; ++l) {
    uint32_t* rank = placement.rank.data() + size_t{l} * placement.experts;
    for (uint32_t e = placement.experts; e > 1; --e) std::swap(rank[e - 1], rank[rng.below(e)]);
  }
  return placement;
}

TEST(migration, any_permutation_within_memory) {
  for (const uint32_t spare : {0U, 1U, 3U}) {
    for (uint64_t seed = 1; seed <= 20; ++seed) {
      SCOPED_TRACE(spare * 100 + seed);
      const Problem problem = generate_problem(TrafficKind::kZipf, {.layers = 3, .experts = 16}, 4, seed);
      const Placement target = shuffled(problem.old, seed);
      const MigrationOptions options{.spare_experts = spare, .experts_per_batch = static_cast<uint32_t>(1 + seed % 3)};
      const Result<MigrationPlan> plan = plan_migration(problem, target, options);
      ASSERT_TRUE(plan.ok()) << plan.error().message;
      Replay replay(problem, options);
      replay.run(*plan);
      replay.expect_is(target);
    }
  }
}

TEST(migration, copies_within_memory) {
  for (const uint32_t spare : {0U, 1U, 2U}) {
    for (uint64_t seed = 1; seed <= 10; ++seed) {
      SCOPED_TRACE(spare * 100 + seed);
      Problem problem = generate_problem(TrafficKind::kZipf, {.layers = 3, .experts = 16}, 4, seed);
      problem.redundant = 8;
      problem.old = {};
      for (const Solver from : {Solver::kLinear, Solver::kEplb, Solver::kGreedy}) {
        for (const Solver to : {Solver::kEplb, Solver::kFlow}) {
          problem.old = {};
          problem.old = solve(problem, from)->placement;
          const Placement target = solve(problem, to)->placement;
          const MigrationOptions options{.spare_experts = spare, .experts_per_batch = 2};
          const Result<MigrationPlan> plan = plan_migration(problem, target, options);
          ASSERT_TRUE(plan.ok()) << plan.error().message;
          Replay replay(problem, options);
          replay.run(*plan);
          replay.expect_is(target);
        }
      }
    }
  }
}

TEST(migration, a_ring_is_opened_by_the_spare_slot) {
  Problem problem = generate_problem(TrafficKind::kAffinity, {.experts = 3}, 3, 1);
  Placement target = problem.old;
  target.rank = {1, 2, 0};
  const Result<MigrationPlan> with_spare = plan_migration(problem, target, {.spare_experts = 1});
  ASSERT_TRUE(with_spare.ok());
  EXPECT_EQ(with_spare->steps.size(), 3U);
  for (const MigrationStep& step : with_spare->steps) EXPECT_EQ(step.kind, StepKind::kMove);
  const Result<MigrationPlan> without = plan_migration(problem, target, {.spare_experts = 0});
  ASSERT_TRUE(without.ok());
  EXPECT_EQ(without->steps.size(), 2U);
  for (const MigrationStep& step : without->steps) EXPECT_EQ(step.kind, StepKind::kSwap);
}

TEST(migration, cost_and_gain_by_hand) {
  // Two ranks, a source on each; each expert's tokens come from the other rank's source.
  Problem problem = generate_problem(TrafficKind::kAffinity, {.experts = 2}, 2, 1);
  problem.traffic.tokens = {0, 1000, 1000, 0};  // source 0: expert 1; source 1: expert 0
  Placement target = problem.old;
  target.rank = {1, 0};
  MigrationOptions options{.expert_bytes = 1e6,
                           .link_bytes_per_s = 1e9,
                           .token_bytes = 1e4,
                           .busy_token_s = 1e-6,
                           .spare_experts = 1,
                           .experts_per_batch = 1,
                           .windows = 2,
                           .margin = 1};
  Result<MigrationPlan> plan = plan_migration(problem, target, options);
  ASSERT_TRUE(plan.ok());
  EXPECT_DOUBLE_EQ(plan->bytes, 2e6);
  EXPECT_DOUBLE_EQ(plan->cost_s, 1e-3);                    // both at once, one each way
  EXPECT_DOUBLE_EQ(plan->gain_s, 2000 * 1e4 / (1e9 * 2));  // 2000 tokens less over two ranks' links; loads as before
  EXPECT_TRUE(plan->pays);
  options.windows = 0.05;
  plan = plan_migration(problem, target, options);
  ASSERT_TRUE(plan.ok());
  EXPECT_FALSE(plan->pays);
  EXPECT_NE(plan->reason.find("do not cover"), std::string::npos) << plan->reason;
}

TEST(migration, weights_agree_with_seconds) {
  const Problem problem = generate_problem(TrafficKind::kZipf, {.layers = 1, .sources = 2, .experts = 8}, 2, 3);
  for (const double token_bytes : {8192.0, 0.0}) {
    MigrationOptions options;
    options.token_bytes = token_bytes;
    Problem weighted = problem;
    weighted.weights = weights_of(options, problem.ranks());
    EXPECT_GT(weighted.weights.gamma, 0);
    weighted.weights.gamma = 0;
    const auto of = [&](Solver solver) {
      const Cost cost = total(evaluate(weighted, solve(weighted, solver)->placement));
      return std::pair(cost.objective, window_s(cost, 2, options));
    };
    const auto [a, a_s] = of(Solver::kLinear);
    const auto [b, b_s] = of(Solver::kEplb);
    ASSERT_NE(a_s, b_s);
    const double unit_s = token_bytes > 0 ? token_bytes / options.link_bytes_per_s / 2 : options.busy_token_s / 2;
    EXPECT_NEAR((a_s - b_s) / unit_s, a - b, 1e-6 * std::abs(a));
  }
}

TEST(migration, a_worse_placement_never_pays) {
  Problem problem = generate_problem(TrafficKind::kAffinity, {.layers = 2, .experts = 16}, 4, 3);
  problem.old = solve(problem, Solver::kFlow)->placement;
  const Result<MigrationPlan> plan = plan_migration(problem, shuffled(problem.old, 5), {.windows = 1e9, .margin = 0});
  ASSERT_TRUE(plan.ok());
  EXPECT_LT(plan->gain_s, 0);
  EXPECT_FALSE(plan->pays);
}

TEST(migration, nothing_to_do) {
  const Problem problem = generate_problem(TrafficKind::kHot, {.experts = 8}, 4, 1);
  const Result<MigrationPlan> plan = plan_migration(problem, problem.old);
  ASSERT_TRUE(plan.ok());
  EXPECT_TRUE(plan->steps.empty());
  EXPECT_FALSE(plan->pays);
}

TEST(migration, refuses_what_is_no_placement) {
  Problem problem = generate_problem(TrafficKind::kHot, {.experts = 8}, 4, 1);
  Placement target = problem.old;
  target.rank[0] = 3;  // rank 3 would hold three experts
  EXPECT_FALSE(plan_migration(problem, target).ok());
  target = problem.old;
  problem.old = {};
  EXPECT_FALSE(plan_migration(problem, target).ok());
}

}  // namespace
}  // namespace kindred::place
