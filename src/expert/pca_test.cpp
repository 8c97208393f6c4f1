#include "expert/pca.h"

#include <gtest/gtest.h>

#include <cmath>

#include "base/rng.h"

namespace kindred::expert {
namespace {

TEST(Pca, FourPointsByHand) {
  // Variances 8 along (1, 1) and 2 along (1, -1), about the mean (3, 1).
  const float far = std::sqrt(2.0F), near = std::sqrt(0.5F);
  const std::vector<float> data = {3 + far, 1 + far, 3 - far, 1 - far, 3 + near, 1 - near, 3 - near, 1 + near};
  const Pca pca = principal_components({data, 2});
  EXPECT_NEAR(pca.mean[0], 3, 1e-6);
  EXPECT_NEAR(pca.mean[1], 1, 1e-6);
  EXPECT_NEAR(pca.share[0], 0.8, 1e-6);
  EXPECT_NEAR(pca.share[1], 0.2, 1e-6);
  EXPECT_NEAR(pca.component[0][0], std::sqrt(0.5), 1e-6);
  EXPECT_NEAR(pca.component[0][1], std::sqrt(0.5), 1e-6);
  EXPECT_NEAR(std::abs(pca.component[1][0]), std::sqrt(0.5), 1e-6);
  EXPECT_NEAR(pca.component[1][0], -pca.component[1][1], 1e-6);
  const auto first = pca.at(std::span(data).first(2));
  EXPECT_NEAR(first[0], 2, 1e-5);
  EXPECT_NEAR(first[1], 0, 1e-5);
}

TEST(Pca, FindsThePlaneInManyDimensions) {
  Rng rng(8);
  constexpr size_t kDims = 40, kPoints = 60;
  std::vector<float> data;
  for (size_t i = 0; i < kPoints; ++i) {
    const double a = 10 * (rng.uniform() - 0.5), b = 4 * (rng.uniform() - 0.5);
    for (size_t j = 0; j < kDims; ++j) {
      data.push_back(static_cast<float>((j % 2 == 0 ? a : b) + 0.01 * rng.uniform()));
    }
  }
  const Pca pca = principal_components({data, kDims});
  EXPECT_GT(pca.share[0] + pca.share[1], 0.999);
  EXPECT_GT(pca.share[0], 2 * pca.share[1]);
  double length = 0, across = 0;
  for (size_t j = 0; j < kDims; ++j) {
    length += pca.component[1][j] * pca.component[1][j];
    across += pca.component[0][j] * pca.component[1][j];
  }
  EXPECT_NEAR(length, 1, 1e-9);
  EXPECT_NEAR(across, 0, 1e-9);
}

TEST(Pca, OnePointOneDimensionAndIdenticalPoints) {
  const std::vector<float> same = {1, 2, 3, 1, 2, 3};
  for (const size_t points : {1, 2}) {
    const Pca pca = principal_components({std::span(same).first(3 * points), 3});
    EXPECT_EQ(pca.share[0], 0);
    EXPECT_EQ(pca.at(std::span(same).first(3))[0], 0);
  }
  const Pca line = principal_components({std::span(same).first(3), 1});
  EXPECT_NEAR(line.share[0], 1, 1e-9);
  EXPECT_EQ(line.share[1], 0);
  EXPECT_NEAR(line.at(std::span(same).subspan(2, 1))[0], 1, 1e-9);
}

}  // namespace
}  // namespace kindred::expert
