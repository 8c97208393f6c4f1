#include "policy/switchback.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numbers>
#include <set>

#include "base/rng.h"

namespace kindred::policy {
namespace {

TEST(SwitchbackSchedule, EveryBlockHasEveryArmOnceInAnOrderOfItsOwn) {
  const SwitchbackSchedule schedule(3, 7);
  std::map<std::vector<uint32_t>, int> orders;
  for (uint64_t block = 0; block < 600; ++block) {
    std::vector<uint32_t> order = schedule.order_of(block);
    for (uint32_t i = 0; i < 3; ++i) EXPECT_EQ(schedule.arm_of(block * 3 + i), order[i]);
    ++orders[order];
    std::ranges::sort(order);
    EXPECT_EQ(order, (std::vector<uint32_t>{0, 1, 2}));
  }
  EXPECT_EQ(orders.size(), 6U);
  for (const auto& [order, count] : orders) EXPECT_NEAR(count, 100, 40);
  EXPECT_EQ(SwitchbackSchedule(3, 7).order_of(5), schedule.order_of(5));
}

// Values from tables of Student's distribution.
TEST(PairedDifference, StudentsT) {
  EXPECT_NEAR(students_t(0.95, 1), 12.706, 0.001);
  EXPECT_NEAR(students_t(0.95, 9), 2.262, 0.001);
  EXPECT_NEAR(students_t(0.99, 30), 2.750, 0.001);
}

TEST(PairedDifference, ByHand) {
  const std::vector<std::pair<double, double>> blocks = {{10, 11}, {20, 23}, {30, 32}};  // 1, 3, 2
  const auto estimate = paired_difference(blocks, 0.95);
  ASSERT_TRUE(estimate);
  EXPECT_DOUBLE_EQ(estimate->difference, 2);
  EXPECT_NEAR(estimate->high - estimate->difference, 4.303 / std::sqrt(3), 0.001);
  EXPECT_DOUBLE_EQ(estimate->control, 20);
  EXPECT_FALSE(paired_difference(std::span(blocks).first(1), 0.95));
  EXPECT_FALSE(estimate->claimed);
}

TEST(PairedDifference, FewBlocksClaimNothing) {
  std::vector<std::pair<double, double>> blocks(kMinBlocks - 1, {1, 2});
  blocks[0].second = 2.001;
  EXPECT_GT(paired_difference(blocks, 0.95)->low, 0);
  EXPECT_FALSE(paired_difference(blocks, 0.95)->claimed);
  blocks.emplace_back(1, 2);
  EXPECT_TRUE(paired_difference(blocks, 0.95)->claimed);
}

double gaussian(Rng& rng) {
  return std::sqrt(-2 * std::log(1 - rng.uniform())) * std::cos(2 * std::numbers::pi * rng.uniform());
}

struct Simulated {
  double coverage = 0, claims = 0;
};

// Experiments on a fleet that drifts far more than the policies differ, with long-tailed noise per slice.
Simulated simulate(double effect, size_t blocks, uint64_t seed) {
  constexpr int kExperiments = 4000;
  Rng rng(seed);
  Simulated out;
  for (int e = 0; e < kExperiments; ++e) {
    std::vector<std::pair<double, double>> values;
    double drift = 100;
    for (size_t b = 0; b < blocks; ++b) {
      drift += 20 * gaussian(rng);
      const auto slice = [&] { return drift + std::exp(0.5 * gaussian(rng)); };
      values.emplace_back(slice(), slice() + effect);
    }
    const auto estimate = paired_difference(values, 0.95);
    out.coverage += estimate->low <= effect && effect <= estimate->high ? 1.0 / kExperiments : 0;
    out.claims += estimate->claimed ? 1.0 / kExperiments : 0;
  }
  return out;
}

TEST(PairedDifference, IntervalsCoverTheTruthAsOftenAsTheySay) {
  for (const size_t blocks : {6U, 12U, 40U}) {
    for (const double effect : {0.0, 0.7}) {
      const Simulated got = simulate(effect, blocks, 11 + blocks);
      EXPECT_GE(got.coverage, 0.94) << blocks << " blocks";
      EXPECT_LE(got.coverage, 0.975) << blocks << " blocks";
    }
  }
}

TEST(PairedDifference, NoEffectIsRarelyClaimedAndARealOneIs) {
  EXPECT_LE(simulate(0, 20, 3).claims, 0.06);
  EXPECT_GE(simulate(1.0, 40, 4).claims, 0.95);
}

}  // namespace
}  // namespace kindred::policy
