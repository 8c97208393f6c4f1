#include "expert/inner_product.h"

#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "base/rng.h"

namespace kindred::expert {
namespace {

TEST(InnerProduct, TogetherIsBitEqualToOneByOne) {
  Rng rng(7);
  for (const size_t size : {1U, 7U, 8U, 9U, 64U, 333U}) {
    for (const size_t rows : {1U, 3U, 4U, 5U, 16U}) {
      std::vector<float> a(size), b(size * rows), out(rows);
      for (float& x : a) x = static_cast<float>(rng.uniform() - 0.5);
      for (float& x : b) x = static_cast<float>(rng.uniform() - 0.5);
      dots(a, b, out);
      for (size_t r = 0; r < rows; ++r) EXPECT_EQ(out[r], dot(a, std::span(b).subspan(r * size, size)));
    }
  }
}

// Eight sums side by side, as the header says; whatever instructions were used.
float by_definition(std::span<const float> a, std::span<const float> b) {
  std::array<float, 8> sums{};
  for (size_t i = 0; i < a.size(); ++i) {
    const volatile float product = a[i] * b[i];  // or the compiler may contract it with the addition
    sums[i % 8] += product;
  }
  return ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
}

TEST(InnerProduct, HasOneResultOnAllProcessors) {
  Rng rng(8);
  for (const size_t size : {1U, 5U, 8U, 13U, 64U, 6144U}) {
    std::vector<float> a(size), b(size);
    for (float& x : a) x = static_cast<float>(rng.uniform() - 0.5);
    for (float& x : b) x = static_cast<float>(rng.uniform() - 0.5);
    EXPECT_EQ(dot(a, b), by_definition(a, b)) << size;
  }
}

TEST(InnerProduct, OfKnownVectors) {
  const std::vector<float> a = {1, 2, 3, 4, 5, 6, 7, 8, 9}, b = {9, 8, 7, 6, 5, 4, 3, 2, 1};
  EXPECT_EQ(dot(a, b), 165.0F);
  EXPECT_EQ(dot(std::span<const float>(), std::span<const float>()), 0.0F);
}

}  // namespace
}  // namespace kindred::expert
