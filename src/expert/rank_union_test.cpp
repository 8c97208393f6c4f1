#include "expert/rank_union.h"

#include <gtest/gtest.h>

#include <map>

#include "base/rng.h"

namespace kindred::expert {
namespace {

// From the definition, by whole tables.
double by_hand(const std::vector<uint32_t>& rank, uint32_t layers, uint32_t experts, const std::vector<double>& used) {
  double out = 0;
  for (uint32_t l = 0; l < layers; ++l) {
    std::map<uint32_t, double> of;
    for (uint32_t e = 0; e < experts; ++e) of[rank[l * experts + e]] += used[l * experts + e];
    double most = 0;
    for (const auto& [r, sum] : of) most = std::max(most, sum);
    out += most;
  }
  return out;
}

TEST(RankUnion, IsTheBusiestRankOfEachLayer) {
  Rng rng(3);
  for (int round = 0; round < 100; ++round) {
    const auto layers = static_cast<uint32_t>(1 + rng.below(5)), experts = static_cast<uint32_t>(1 + rng.below(40));
    const auto ranks = static_cast<uint32_t>(1 + rng.below(8));
    std::vector<uint32_t> rank;
    std::vector<float> unused, inclusion;
    std::vector<double> used, joined, alone;
    for (uint32_t i = 0; i < layers * experts; ++i) {
      rank.push_back(static_cast<uint32_t>(rng.below(ranks)));
      unused.push_back(static_cast<float>(rng.uniform()));
      inclusion.push_back(static_cast<float>(rng.uniform()));
      used.push_back(1.0 - unused[i]);
      joined.push_back(1.0 - unused[i] * (1 - inclusion[i]));
      alone.push_back(inclusion[i]);
    }
    const auto map = RankMap::make(layers, experts, ranks, rank);
    ASSERT_TRUE(map) << map.error().message;
    EXPECT_NEAR(busiest_rank_used(*map, unused), by_hand(rank, layers, experts, used), 1e-4);
    EXPECT_NEAR(busiest_rank_used(*map, unused, inclusion), by_hand(rank, layers, experts, joined), 1e-4);
    EXPECT_NEAR(busiest_rank_used(*map, {}, inclusion), by_hand(rank, layers, experts, alone), 1e-4);
    EXPECT_GE(busiest_rank_used(*map, unused, inclusion), busiest_rank_used(*map, unused));
  }
}

TEST(RankUnion, OneRankHasAll) {
  const auto map = RankMap::linear(2, 3, 1);
  ASSERT_TRUE(map);
  const std::vector<float> unused = {1, 0.5, 0, 1, 1, 1};
  EXPECT_DOUBLE_EQ(busiest_rank_used(*map, unused), 1.5);
}

TEST(RankUnion, LinearSharesExpertsOut) {
  const auto map = RankMap::linear(1, 8, 4);
  ASSERT_TRUE(map);
  EXPECT_EQ(std::vector<uint8_t>(map->of_layer(0).begin(), map->of_layer(0).end()),
            (std::vector<uint8_t>{0, 0, 1, 1, 2, 2, 3, 3}));
}

TEST(RankUnion, NamesWhatIsWrong) {
  const std::vector<uint32_t> rank = {0, 1, 2, 3};
  EXPECT_EQ(RankMap::make(2, 3, 4, rank).error().field, "placement");
  EXPECT_EQ(RankMap::make(2, 2, 3, rank).error().field, "placement");
  EXPECT_EQ(RankMap::make(2, 2, 0, rank).error().field, "ranks");
  EXPECT_EQ(RankMap::make(2, 2, 257, rank).error().field, "ranks");
}

}  // namespace
}  // namespace kindred::expert
