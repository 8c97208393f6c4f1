#include "expert/union_model.h"

#include <gtest/gtest.h>

#include "base/rng.h"

namespace kindred::expert {
namespace {

TEST(UnionModel, InclusionIsTheShareOfTokens) {
  const std::vector<uint32_t> counts = {0, 5, 10};
  EXPECT_EQ(inclusion_probabilities(counts, 10), (std::vector<float>{0.0F, 0.5F, 1.0F}));
}

TEST(UnionModel, GrowthIsTheDifference) {
  Rng rng(1);
  ExpectedUnion batch(50);
  EXPECT_EQ(batch.value(), 0.0);
  for (int r = 0; r < 6; ++r) {
    std::vector<float> p(50);
    for (float& x : p) x = static_cast<float>(rng.uniform());
    const double before = batch.value(), growth = batch.growth(p);
    batch.add(p);
    EXPECT_NEAR(batch.value(), before + growth, 1e-4);
  }
}

TEST(UnionModel, BatchesOfAllAreTheProduct) {
  const std::vector<float> a = {0.5F, 0.0F}, b = {0.5F, 1.0F};
  BatchUnion both(2, 2);
  both.add(a);
  both.add(b);
  EXPECT_NEAR(both.value(), 0.75 + 1.0, 1e-9);
  BatchUnion single(2, 1);  // the mean of the two alone
  single.add(a);
  single.add(b);
  EXPECT_NEAR(single.value(), 0.5 * (0.5 + 1.5), 1e-9);
}

TEST(UnionModel, IsTheMeanOverAllSubsets) {
  Rng rng(9);
  constexpr size_t kCells = 7, kRequests = 6;
  std::vector<std::vector<float>> requests(kRequests, std::vector<float>(kCells));
  BatchUnion all(kCells, 3);
  for (auto& p : requests) {
    for (float& x : p) x = static_cast<float>(rng.uniform());
    all.add(p);
  }
  double sum = 0;
  int subsets = 0;
  for (size_t i = 0; i < kRequests; ++i) {
    for (size_t j = i + 1; j < kRequests; ++j) {
      for (size_t k = j + 1; k < kRequests; ++k, ++subsets) {
        ExpectedUnion batch(kCells);
        batch.add(requests[i]);
        batch.add(requests[j]);
        batch.add(requests[k]);
        sum += batch.value();
      }
    }
  }
  EXPECT_NEAR(all.value(), sum / subsets, 1e-5);
}

TEST(UnionModel, FewerRequestsThanTheBatch) {
  BatchUnion batch(1, 8);
  EXPECT_EQ(batch.value(), 0.0);
  batch.add(std::vector<float>{0.25F});
  EXPECT_NEAR(batch.value(), 0.25, 1e-9);
}

}  // namespace
}  // namespace kindred::expert
