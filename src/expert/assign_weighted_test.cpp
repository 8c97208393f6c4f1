#include "expert/assign_weighted.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "base/rng.h"
#include "expert/assign.h"

namespace kindred::expert {
namespace {

std::vector<uint64_t> loads_of(const WeightedAssignment& assigned, const std::vector<uint32_t>& weights, size_t k) {
  std::vector<uint64_t> loads(k, 0);
  for (size_t i = 0; i < weights.size(); ++i) loads[assigned.column[i]] += weights[i];
  return loads;
}

// The cheapest whole assignment under the cap, by trying all; infinite if there is none.
double by_trying_all(const std::vector<double>& cost, const std::vector<uint32_t>& weights, size_t k, uint64_t cap) {
  double best = std::numeric_limits<double>::infinity();
  std::vector<uint32_t> column(weights.size(), 0);
  for (;;) {
    std::vector<uint64_t> loads(k, 0);
    double total = 0;
    for (size_t i = 0; i < weights.size(); ++i) {
      loads[column[i]] += weights[i];
      total += cost[i * k + column[i]];
    }
    if (*std::max_element(loads.begin(), loads.end()) <= cap) best = std::min(best, total);
    size_t digit = 0;
    while (digit < column.size() && ++column[digit] == k) column[digit++] = 0;
    if (digit == column.size()) return best;
  }
}

TEST(AssignWeighted, HandComputed) {
  // All prefer column 0; it holds 4 of 7. Per unit, moving row 0 (weight 4) costs 0.25, row 1 (weight 2) 0.3, row 2
  // (weight 1) 2: so 3 of row 0's 4 units leave in the split optimum, which then costs 0.75.
  const std::vector<double> cost = {0, 1, 0, 0.6, 0, 2};
  const std::vector<uint32_t> weights = {4, 2, 1};
  const auto got = assign_weighted(cost, weights, 2, 4);
  ASSERT_TRUE(got.ok()) << got.error().message;
  EXPECT_NEAR(got->lower_bound, 0.75, 1e-12);
  EXPECT_EQ(got->split, 1U);
  EXPECT_EQ(got->column, (std::vector<uint32_t>{1, 0, 0}));
  EXPECT_NEAR(got->total, 1.0, 1e-12);
}

TEST(AssignWeighted, NoCapInTheWayMeansCheapest) {
  const std::vector<double> cost = {3, 1, 2, /**/ 0, 5, 5, /**/ 4, 4, -1};
  const auto got = assign_weighted(cost, std::vector<uint32_t>{9, 1, 5}, 3, 100);
  ASSERT_TRUE(got.ok());
  EXPECT_EQ(got->column, (std::vector<uint32_t>{1, 0, 2}));
  EXPECT_NEAR(got->total, 0, 1e-12);
  EXPECT_NEAR(got->lower_bound, 0, 1e-12);
  EXPECT_EQ(got->split, 0U);
}

TEST(AssignWeighted, EqualWeightsGiveTheExactAssignment) {
  Rng rng(3);
  for (int round = 0; round < 20; ++round) {
    const size_t k = 2 + rng.below(4), n = k * (1 + rng.below(9));
    std::vector<double> cost(n * k);
    for (double& c : cost) c = rng.uniform();
    const std::vector<uint32_t> weights(n, 7), capacity(k, static_cast<uint32_t>(n / k));
    const auto got = assign_weighted(cost, weights, k, 7 * (n / k));
    const auto exact = assign_rows(cost, capacity);
    ASSERT_TRUE(got.ok() && exact.ok());
    EXPECT_NEAR(got->total, exact->total, 1e-9);
    EXPECT_NEAR(got->lower_bound, exact->total, 1e-9);
    EXPECT_EQ(got->split, 0U);
  }
}

TEST(AssignWeighted, KeepsItsBoundsAgainstTryingAll) {
  Rng rng(11);
  int under_cap = 0, optimal = 0;
  constexpr int kRounds = 60;
  for (int round = 0; round < kRounds; ++round) {
    constexpr size_t kRows = 8, kColumns = 3;
    std::vector<double> cost(kRows * kColumns);
    for (double& c : cost) c = rng.uniform();
    std::vector<uint32_t> weights(kRows);
    for (uint32_t& w : weights) w = 1 + static_cast<uint32_t>(rng.below(20));
    const uint64_t sum = std::accumulate(weights.begin(), weights.end(), uint64_t{0});
    const uint64_t cap = sum * 115 / 100 / kColumns + 1;
    const auto got = assign_weighted(cost, weights, kColumns, cap);
    ASSERT_TRUE(got.ok());
    const std::vector<uint64_t> loads = loads_of(*got, weights, kColumns);
    const uint64_t most = *std::max_element(loads.begin(), loads.end());
    EXPECT_LE(most, got->limit);
    const double best = by_trying_all(cost, weights, kColumns, cap);
    EXPECT_GE(best, got->lower_bound - 1e-9);
    if (most > cap) continue;
    ++under_cap;
    EXPECT_GE(got->total, best - 1e-9);
    optimal += got->total < best + 1e-9 ? 1 : 0;
  }
  EXPECT_GE(under_cap, kRounds * 9 / 10);
  EXPECT_GE(optimal, kRounds / 3);
}

TEST(AssignWeighted, ManyRowsComeCloseToTheLowerBound) {
  Rng rng(5);
  constexpr size_t kRows = 2000, kColumns = 8;
  std::vector<double> cost(kRows * kColumns);
  std::vector<uint32_t> weights(kRows);
  for (size_t i = 0; i < kRows; ++i) {
    weights[i] = 1 + static_cast<uint32_t>(rng.below(i % 8 == 0 ? 500 : 50));  // one kind decodes for longer
    for (size_t c = 0; c < kColumns; ++c) cost[i * kColumns + c] = rng.uniform() + (i % kColumns == c ? 0 : 0.5);
  }
  const uint64_t sum = std::accumulate(weights.begin(), weights.end(), uint64_t{0});
  const uint64_t cap = sum * 105 / 100 / kColumns;
  const auto got = assign_weighted(cost, weights, kColumns, cap);
  ASSERT_TRUE(got.ok());
  const std::vector<uint64_t> loads = loads_of(*got, weights, kColumns);
  EXPECT_LE(*std::max_element(loads.begin(), loads.end()), cap);
  EXPECT_LT(got->split, kColumns);
  EXPECT_LT(got->total, got->lower_bound * 1.01);
}

TEST(AssignWeighted, OneHeavyRowDoesNotFitAndIsAlone) {
  const std::vector<double> cost = {0, 1, 0, 1, 0, 1};
  const std::vector<uint32_t> weights = {100, 1, 1};
  const auto got = assign_weighted(cost, weights, 2, 51);
  ASSERT_TRUE(got.ok());
  EXPECT_EQ(got->limit, 151U);
  EXPECT_NE(got->column[0], got->column[1]);
  EXPECT_NE(got->column[0], got->column[2]);
}

TEST(AssignWeighted, RefusesWhatCannotBe) {
  const std::vector<double> cost = {0, 1, 0, 1};
  EXPECT_FALSE(assign_weighted(cost, std::vector<uint32_t>{1, 1, 1}, 2, 9).ok());
  EXPECT_FALSE(assign_weighted(cost, std::vector<uint32_t>{1, 0}, 2, 9).ok());
  EXPECT_FALSE(assign_weighted(cost, std::vector<uint32_t>{3, 4}, 2, 3).ok());
  EXPECT_FALSE(assign_weighted(cost, {}, 0, 3).ok());
  EXPECT_FALSE(
      assign_weighted(std::vector<double>{0, std::numeric_limits<double>::quiet_NaN()}, std::vector<uint32_t>{1}, 2, 3)
          .ok());
}

}  // namespace
}  // namespace kindred::expert
