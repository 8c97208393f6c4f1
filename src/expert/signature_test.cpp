#include "expert/signature.h"

#include <gtest/gtest.h>

#include <cmath>

namespace kindred::expert {
namespace {

Signature signature_of(const std::vector<uint32_t>& counts) {
  const std::vector<float> idf(counts.size(), 1.0F);
  const std::vector<uint8_t> mask = {1};
  Signature out;
  build_signature(counts, idf, mask, out);
  return out;
}

TEST(Signature, WorkedExampleOfThePaperCorrected) {
  // The published summary prints 0.45, 0.78 and 0.50 for these.
  const Signature a = signature_of({2, 0, 1, 0}), b = signature_of({1, 1, 0, 0}), c = signature_of({2, 0, 1, 2});
  EXPECT_NEAR(dot(a, b), 0.632, 5e-4);
  EXPECT_NEAR(dot(a, c), 0.745, 5e-4);
  EXPECT_NEAR(dot(b, c), 0.471, 5e-4);
}

TEST(Signature, KeepsOnlyMaskedLayersAndUnitLength) {
  const std::vector<uint32_t> counts = {1, 2, 3, 4, 5, 6};  // three layers of two experts
  const std::vector<float> idf = {1, 1, 0.5F, 2, 1, 0};
  const std::vector<uint8_t> mask = {0, 1, 1};
  Signature out;
  ASSERT_TRUE(build_signature(counts, idf, mask, out));
  const double norm = std::sqrt(1.5 * 1.5 + 8.0 * 8 + 5 * 5);
  ASSERT_EQ(out.size(), 4U);
  EXPECT_NEAR(out[0], 1.5 / norm, 1e-6);
  EXPECT_NEAR(out[1], 8 / norm, 1e-6);
  EXPECT_NEAR(out[2], 5 / norm, 1e-6);
  EXPECT_EQ(out[3], 0.0F);
}

TEST(Signature, ZeroVectorIsReportedAndFinite) {
  const std::vector<uint32_t> counts = {3, 0};
  const std::vector<float> idf = {0, 1};
  const std::vector<uint8_t> mask = {1};
  Signature out;
  EXPECT_FALSE(build_signature(counts, idf, mask, out));
  EXPECT_EQ(out, (Signature{0, 0}));
}

TEST(Signature, HugeCountsDoNotOverflow) {
  const Signature out = signature_of({4'000'000'000U, 4'000'000'000U, 0, 0});
  EXPECT_NEAR(out[0], std::sqrt(0.5), 1e-6);
}

TEST(Idf, CountsRequestsNotActivations) {
  const std::vector<uint32_t> counts = {5, 0, 1, /**/ 9, 0, 0, /**/ 1, 0, 7};
  const std::vector<uint32_t> df = document_frequency(counts, 3);
  EXPECT_EQ(df, (std::vector<uint32_t>{3, 0, 2}));
  const std::vector<float> idf = inverse_document_frequency(df, 3);
  EXPECT_EQ(idf[0], 0.0F);
  EXPECT_NEAR(idf[1], std::log(4.0), 1e-6);
  EXPECT_NEAR(idf[2], std::log(4.0 / 3.0), 1e-6);
}

TEST(Dot, IsExactForEveryLength) {
  for (size_t size = 0; size < 40; ++size) {
    std::vector<float> a(size), b(size, 2.0F);
    for (size_t i = 0; i < size; ++i) a[i] = static_cast<float>(i);
    EXPECT_EQ(dot(a, b), static_cast<float>(size * (size - (size > 0 ? 1 : 0))));
  }
}

TEST(DrawPairs, DropsSelfPairsAndIsDeterministic) {
  Rng first(5), second(5), none(5);
  const auto pairs = draw_pairs(4, 1000, first);
  EXPECT_EQ(pairs, draw_pairs(4, 1000, second));
  EXPECT_LT(pairs.size(), 1000U);
  EXPECT_GT(pairs.size(), 650U);
  for (const auto& [a, b] : pairs) {
    EXPECT_NE(a, b);
    EXPECT_LT(std::max(a, b), 4U);
  }
  EXPECT_TRUE(draw_pairs(1, 10, none).empty());
}

TEST(LayerMask, PrefersTheLayerThatForetellsDecode) {
  // Layer 0 is the same for everybody, layer 1 is the decode profile itself.
  std::vector<uint32_t> prefill, decode;
  Rng rng(2);
  constexpr size_t kRequests = 20;
  for (size_t i = 0; i < kRequests; ++i) {
    const std::vector<uint32_t> noise = {1, 2, 3, 4};
    std::vector<uint32_t> own;
    for (int e = 0; e < 4; ++e) own.push_back(static_cast<uint32_t>(rng.below(50)));
    prefill.insert(prefill.end(), noise.begin(), noise.end());
    prefill.insert(prefill.end(), own.begin(), own.end());
    decode.insert(decode.end(), 4, 0);
    decode.insert(decode.end(), own.begin(), own.end());
  }
  const std::vector<float> idf(8, 1.0F);
  const auto pairs = draw_pairs(kRequests, 300, rng);
  const LayerMask mask = fit_layer_mask(
      {.prefill_counts = prefill, .decode_counts = decode, .idf = idf, .layers = 2, .experts = 4}, pairs);
  EXPECT_EQ(mask.order, (std::vector<uint32_t>{1, 0}));
  EXPECT_EQ(mask.kept, 1U);
  EXPECT_NEAR(mask.peak_rho(), 1.0, 1e-6);
  EXPECT_EQ(mask.mask, (std::vector<uint8_t>{0, 1}));
}

TEST(LayerMask, SurvivesLayersWithoutCounts) {
  const std::vector<uint32_t> zero(3 * 2 * 4, 0);
  const std::vector<float> idf(8, 1.0F);
  const std::vector<RequestPair> pairs = {{0, 1}, {1, 2}};
  const LayerMask mask =
      fit_layer_mask({.prefill_counts = zero, .decode_counts = zero, .idf = idf, .layers = 2, .experts = 4}, pairs);
  EXPECT_EQ(mask.kept, 1U);  // all prefixes tie at 0: the first
  EXPECT_EQ(mask.peak_rho(), 0.0);
}

}  // namespace
}  // namespace kindred::expert
