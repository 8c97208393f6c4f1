#include "expert/assign.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "base/rng.h"

namespace kindred::expert {
namespace {

// The optimum by dynamic programming over the columns' fill: an independent method for small cases.
double optimum_by_enumeration(const std::vector<double>& cost, const std::vector<uint32_t>& capacity) {
  const size_t columns = capacity.size(), rows = cost.size() / columns;
  std::map<std::vector<uint32_t>, double> states = {{std::vector<uint32_t>(columns, 0), 0.0}};
  for (size_t row = 0; row < rows; ++row) {
    std::map<std::vector<uint32_t>, double> next;
    for (const auto& [fill, total] : states) {
      for (size_t c = 0; c < columns; ++c) {
        if (fill[c] == capacity[c]) continue;
        std::vector<uint32_t> grown = fill;
        ++grown[c];
        const double value = total + cost[row * columns + c];
        const auto [at, fresh] = next.emplace(std::move(grown), value);
        if (!fresh) at->second = std::min(at->second, value);
      }
    }
    states = std::move(next);
  }
  double best = std::numeric_limits<double>::infinity();
  for (const auto& [fill, total] : states) best = std::min(best, total);
  return best;
}

void expect_within(const Assignment& got, const std::vector<uint32_t>& capacity) {
  std::vector<uint32_t> sizes(capacity.size(), 0);
  for (const uint32_t column : got.column) ++sizes[column];
  for (size_t c = 0; c < capacity.size(); ++c) EXPECT_LE(sizes[c], capacity[c]);
}

TEST(Assign, EqualsEnumerationOnManySmallCases) {
  Rng rng(17);
  for (int round = 0; round < 400; ++round) {
    SCOPED_TRACE(round);
    const size_t columns = 1 + rng.below(5), rows = rng.below(13);
    std::vector<uint32_t> capacity(columns);
    uint32_t room = 0;
    for (uint32_t& c : capacity) {
      c = static_cast<uint32_t>(rng.below(5));
      room += c;
    }
    if (room < rows) capacity[rng.below(columns)] += static_cast<uint32_t>(rows) - room;
    std::vector<double> cost(rows * columns);
    const bool integers = round % 3 == 0;  // many ties
    for (double& c : cost) c = integers ? static_cast<double>(rng.below(4)) : 10 * rng.uniform() - 5;
    const auto got = assign_rows(cost, capacity);
    ASSERT_TRUE(got.ok());
    EXPECT_NEAR(got->total, optimum_by_enumeration(cost, capacity), 1e-9);
    expect_within(*got, capacity);
  }
}

TEST(Assign, LongChainsOfDisplacement) {
  // Everybody prefers column 0; freeing it is cheapest by pushing each column's rows one further.
  constexpr size_t kColumns = 12;
  std::vector<double> cost(kColumns * kColumns, 100.0);
  for (size_t row = 0; row < kColumns; ++row) {
    cost[row * kColumns + row] = row == 0 ? 0.0 : 1.0;
    cost[row * kColumns + (row == 0 ? 0 : row - 1)] = 0.0;
  }
  const std::vector<uint32_t> capacity(kColumns, 1);
  const auto got = assign_rows(cost, capacity);
  ASSERT_TRUE(got.ok());
  EXPECT_EQ(got->total, static_cast<double>(kColumns - 1));
  expect_within(*got, capacity);
}

TEST(Assign, LargeCaseIsOptimalByItsResidualGraph) {
  // No cycle and no path to free room may lower the total: checked by Bellman-Ford on the result.
  Rng rng(4);
  constexpr size_t kRows = 2000, kColumns = 9;
  std::vector<double> cost(kRows * kColumns);
  for (size_t i = 0; i < cost.size(); ++i) cost[i] = rng.uniform() + 0.05 * static_cast<double>(i % kColumns);
  std::vector<uint32_t> capacity(kColumns, 250);
  capacity[3] = 0;
  capacity[8] = 400;
  const auto got = assign_rows(cost, capacity);
  ASSERT_TRUE(got.ok());
  expect_within(*got, capacity);

  constexpr size_t kNodes = kColumns + 1;  // the last: free room
  constexpr double kNone = std::numeric_limits<double>::infinity();
  std::vector<double> edge(kNodes * kNodes, kNone);
  std::vector<uint32_t> sizes(kColumns, 0);
  for (size_t row = 0; row < kRows; ++row) {
    const uint32_t at = got->column[row];
    ++sizes[at];
    for (size_t to = 0; to < kColumns; ++to) {
      double& e = edge[at * kNodes + to];
      e = std::min(e, cost[row * kColumns + to] - cost[row * kColumns + at]);
    }
  }
  for (size_t c = 0; c < kColumns; ++c) {
    if (sizes[c] < capacity[c]) edge[c * kNodes + kColumns] = 0;
    if (sizes[c] > 0) edge[kColumns * kNodes + c] = 0;
  }
  std::vector<double> distance(kNodes, 0.0);
  for (size_t round = 0; round <= kNodes; ++round) {
    for (size_t a = 0; a < kNodes; ++a) {
      for (size_t b = 0; b < kNodes; ++b) {
        if (distance[a] + edge[a * kNodes + b] >= distance[b] - 1e-12) continue;
        ASSERT_LT(round, kNodes) << "a negative cycle";
        distance[b] = distance[a] + edge[a * kNodes + b];
      }
    }
  }
}

TEST(Assign, RefusesWhatCannotBe) {
  const std::vector<double> cost = {1, 2, 3, 4};
  EXPECT_FALSE(assign_rows(cost, std::vector<uint32_t>{}).ok());
  EXPECT_FALSE(assign_rows(cost, std::vector<uint32_t>{1, 1, 1}).ok());
  EXPECT_FALSE(assign_rows(cost, std::vector<uint32_t>{1, 0}).ok());
  const std::vector<double> bad = {1, std::nan("")};
  EXPECT_FALSE(assign_rows(bad, std::vector<uint32_t>{1, 1}).ok());
  const auto none = assign_rows(std::vector<double>{}, std::vector<uint32_t>{1, 1});
  ASSERT_TRUE(none.ok());
  EXPECT_TRUE(none->column.empty());
}

TEST(BestPermutation, UndoesAShuffle) {
  Rng rng(8);
  constexpr size_t k = 16;
  std::vector<uint32_t> shuffled(k);
  for (uint32_t i = 0; i < k; ++i) shuffled[i] = i;
  for (size_t i = k - 1; i > 0; --i) std::swap(shuffled[i], shuffled[rng.below(i + 1)]);
  std::vector<double> similarity(k * k);
  for (double& s : similarity) s = 0.8 * rng.uniform();
  for (size_t r = 0; r < k; ++r) similarity[r * k + shuffled[r]] = 0.95;
  const auto permutation = best_permutation(similarity, k);
  ASSERT_TRUE(permutation.ok());
  EXPECT_EQ(*permutation, shuffled);
  EXPECT_FALSE(best_permutation(similarity, 3).ok());
}

}  // namespace
}  // namespace kindred::expert
