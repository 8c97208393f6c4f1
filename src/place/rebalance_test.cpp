#include "place/rebalance.h"

#include <gtest/gtest.h>

#include "place/generate.h"

namespace kindred::place {
namespace {

constexpr TrafficShape kShape{.layers = 2, .sources = 4, .experts = 16};

// A link on which every migration would pay at once, so that only hysteresis stands in its way.
RebalanceOptions eager() { return {.migration = {.expert_bytes = 1, .windows = 4, .margin = 1}}; }

struct Outcome {
  int migrations = 0, in_last_half = 0;
};

// `pattern(w)` is the traffic of window w.
Outcome migrations_over(int windows, const RebalanceOptions& options, const auto& pattern) {
  Problem setup = generate_problem(TrafficKind::kAffinity, kShape, 4, 1);
  Rebalancer rebalancer(setup, options);
  Outcome outcome;
  for (int w = 0; w < windows; ++w) {
    const Result<Rebalance> decision = rebalancer.window(pattern(w));
    EXPECT_TRUE(decision.ok());
    if (!decision.ok() || !decision->target) continue;
    ++outcome.migrations;
    if (w >= windows / 2) ++outcome.in_last_half;
    rebalancer.moved_to(*decision->target);
  }
  return outcome;
}

// The property: whatever two (or four) kinds of traffic take turns, each window with some noise, placement comes to
// rest, although every one of them alone would be worth a migration from the other's placement.
TEST(rebalance, alternating_traffic_does_not_oscillate) {
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    std::vector<Traffic> kinds;
    for (uint64_t k = 0; k < 4; ++k) kinds.push_back(generate_traffic(TrafficKind::kAffinity, kShape, 10 * seed + k));
    for (const size_t period : {size_t{2}, size_t{4}}) {
      const Outcome outcome = migrations_over(64, eager(), [&](int w) {
        return drifted(kinds[static_cast<size_t>(w) % period], 0.02, seed * 1000 + static_cast<uint64_t>(w));
      });
      EXPECT_GE(outcome.migrations, 1) << "seed " << seed;
      EXPECT_LE(outcome.migrations, 3) << "seed " << seed << ", period " << period;
      EXPECT_EQ(outcome.in_last_half, 0) << "seed " << seed << ", period " << period;
    }
  }
}

// vLLM's EPLB: every four windows anew, although nothing is gained.
TEST(rebalance, always_places_anew_when_it_is_due) {
  RebalanceOptions options;
  options.solver = Solver::kEplb;
  options.always = true;
  const Traffic traffic = generate_traffic(TrafficKind::kAffinity, kShape, 1);
  const Outcome noisy =
      migrations_over(20, options, [&](int w) { return drifted(traffic, 0.2, 100 + static_cast<uint64_t>(w)); });
  EXPECT_EQ(noisy.migrations, 5);
  EXPECT_EQ(migrations_over(20, options, [&](int) { return traffic; }).migrations, 1);  // the same again is no move
}

// Without memory the same traffic does make it oscillate; so the test above can fail.
TEST(rebalance, one_window_of_memory_oscillates) {
  RebalanceOptions options = eager();
  options.windows = 1;
  options.migration.windows = 1;
  const Traffic a = generate_traffic(TrafficKind::kAffinity, kShape, 1);
  const Traffic b = generate_traffic(TrafficKind::kAffinity, kShape, 2);
  const Outcome outcome = migrations_over(64, options, [&](int w) { return w / 2 % 2 == 0 ? a : b; });
  EXPECT_GE(outcome.in_last_half, 8);
}

TEST(rebalance, follows_a_lasting_change) {
  const Traffic before = generate_traffic(TrafficKind::kAffinity, kShape, 1);
  const Traffic after = generate_traffic(TrafficKind::kAffinity, kShape, 2);
  const Outcome outcome = migrations_over(60, eager(), [&](int w) { return w < 20 ? before : after; });
  EXPECT_GE(outcome.migrations, 2);
  EXPECT_EQ(outcome.in_last_half, 0);
}

TEST(rebalance, stays_where_moving_does_not_pay) {
  RebalanceOptions options = eager();
  options.migration.expert_bytes = 1e15;
  const Traffic traffic = generate_traffic(TrafficKind::kAffinity, kShape, 1);
  EXPECT_EQ(migrations_over(20, options, [&](int) { return traffic; }).migrations, 0);
}

TEST(rebalance, silence_and_nonsense) {
  Rebalancer rebalancer(generate_problem(TrafficKind::kAffinity, kShape, 4, 1), eager());
  Traffic traffic = generate_traffic(TrafficKind::kAffinity, kShape, 1);
  std::fill(traffic.tokens.begin(), traffic.tokens.end(), 0.0);
  const Result<Rebalance> silent = rebalancer.window(traffic);
  ASSERT_TRUE(silent.ok());
  EXPECT_FALSE(silent->target.has_value());
  traffic.tokens[3] = -1;
  EXPECT_FALSE(rebalancer.window(traffic).ok());
  EXPECT_FALSE(rebalancer.window(generate_traffic(TrafficKind::kAffinity, {.layers = 1}, 1)).ok());
}

}  // namespace
}  // namespace kindred::place
