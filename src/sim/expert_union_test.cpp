#include "sim/expert_union.h"

#include <gtest/gtest.h>

#include "sim/cluster_testing.h"

namespace kindred::sim {
namespace {

using testing::small_shape;

std::shared_ptr<const ExpertRanks> ranks_of(const expert::ExpertShape& shape, uint32_t ranks) {
  return std::make_shared<ExpertRanks>(
      ExpertRanks::linear(static_cast<uint32_t>(shape.layers.size()), shape.experts, ranks));
}

TEST(ExpertUnion, CountsDistinctExpertsALayer) {
  const expert::ExpertShape shape = small_shape(2, 130, 2);  // three words, the last with two bits
  ExpertTape tape(shape, 2);
  tape.set(0, 0, 0);
  tape.set(0, 0, 129);
  tape.set(0, 1, 64);
  tape.set(1, 0, 129);
  tape.set(1, 1, 63);
  ExpertUnion u(ranks_of(shape, 1));
  u.add(tape.token(0));
  u.add(tape.token(1));
  EXPECT_EQ(std::vector<uint32_t>(u.count().begin(), u.count().end()), (std::vector<uint32_t>{2, 2}));
  EXPECT_EQ(u.distinct(), 4U);
  u.clear();
  EXPECT_EQ(u.count()[0], 0U);
}

TEST(ExpertUnion, TheRankWithTheMostCounts) {
  const expert::ExpertShape shape = small_shape(1, 8, 2);
  ExpertTape tape(shape, 1);
  for (const uint32_t e : {0U, 1U, 2U, 7U}) tape.set(0, 0, e);
  ExpertUnion linear(ranks_of(shape, 2));  // 0..3 and 4..7
  linear.add(tape.token(0));
  EXPECT_EQ(linear.count()[0], 3U);
  EXPECT_EQ(linear.distinct(), 4U);
  const std::vector<uint32_t> placement = {0, 1, 0, 1, 0, 1, 0, 1};
  Result<ExpertRanks> odd = ExpertRanks::make(1, 8, 2, placement);
  ASSERT_TRUE(odd);
  ExpertUnion alternating(std::make_shared<ExpertRanks>(*odd));
  alternating.add(tape.token(0));
  EXPECT_EQ(alternating.count()[0], 2U);
}

TEST(ExpertUnion, APlacementIsChecked) {
  const std::vector<uint32_t> beyond = {0, 2}, few = {0};
  const Result<ExpertRanks> rank = ExpertRanks::make(1, 2, 2, beyond), size = ExpertRanks::make(1, 2, 2, few);
  ASSERT_FALSE(rank);
  ASSERT_FALSE(size);
  EXPECT_EQ(rank.error().message, "placement: layer 0, expert 1: rank 2; accepted: 0 to 1");
  EXPECT_EQ(size.error().message, "placement: 1 entries; accepted: 1 layers x 2 experts = 2");
}

TEST(ExpertUnion, AChunkUsesWhatItsPromptUsesOften) {
  expert::ExpertCounts counts(small_shape(1, 4, 1));
  counts.tokens = 1000;
  counts.data = {900, 93, 7, 0};
  ExpertUnion u(ranks_of(counts.shape, 1));
  u.add_chunk(counts, 1000);  // all of it: whatever was used
  EXPECT_EQ(u.count()[0], 3U);
  u.clear();
  u.add_chunk(counts, 100);  // expected 90, 9.3, 0.7 (>= ln 2), 0
  EXPECT_EQ(u.count()[0], 3U);
  u.clear();
  u.add_chunk(counts, 99);  // 0.693 x 1000 / 99 = 7
  EXPECT_EQ(u.count()[0], 3U);
  u.clear();
  u.add_chunk(counts, 98);
  EXPECT_EQ(u.count()[0], 2U);
  u.clear();
  u.add_chunk(counts, 0);
  EXPECT_EQ(u.count()[0], 0U);
}

}  // namespace
}  // namespace kindred::sim
