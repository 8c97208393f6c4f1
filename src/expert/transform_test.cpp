#include "expert/transform.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <vector>

#include "expert/signature.h"

namespace kindred::expert {
namespace {

TEST(Transform, NamesGoBothWays) {
  std::set<std::string_view> names;
  for (const Transform transform : kTransforms) {
    names.insert(to_string(transform));
    const auto from_name = parse_transform(to_string(transform));
    const auto from_file = parse_transform(file_spelling(transform));
    ASSERT_TRUE(from_name.ok() && from_file.ok());
    EXPECT_EQ(*from_name, transform);
    EXPECT_EQ(*from_file, transform);
  }
  EXPECT_EQ(names, (std::set<std::string_view>{"count", "count-idf", "log-count", "binary", "gate", "gate-idf"}));
  EXPECT_EQ(file_spelling(Transform::kCountIdf), "count_idf");
  const auto wrong = parse_transform("counts");
  ASSERT_FALSE(wrong.ok());
  EXPECT_NE(wrong.error().message.find("count, count-idf, log-count, binary, gate, gate-idf"), std::string::npos);
  EXPECT_EQ(wrong.error().field, "transform");
}

TEST(Transform, CellsByHand) {
  const std::vector<uint32_t> counts = {9, 0, 1, 5};
  const std::vector<float> gate = {9, 0.5F, 0.25F, 3}, idf = {9, 2, 4, 0.5F};
  const PromptProfile profile{.counts = counts, .gate = gate};
  const std::vector<std::pair<Transform, std::vector<float>>> expected = {
      {Transform::kCount, {0, 1, 5}},
      {Transform::kCountIdf, {0, 4, 2.5F}},
      {Transform::kLogCount, {0, std::log(2.0F), std::log(6.0F)}},
      {Transform::kBinary, {0, 1, 1}},
      {Transform::kGate, {0.5F, 0.25F, 3}},
      {Transform::kGateIdf, {1, 1, 1.5F}},
  };
  for (const auto& [transform, values] : expected) {
    std::vector<float> out(3);
    transform_cells(transform, profile, idf, 1, out);
    for (size_t i = 0; i < 3; ++i) EXPECT_FLOAT_EQ(out[i], values[i]) << to_string(transform) << " " << i;
  }
}

TEST(Transform, SignaturesHaveUnitLengthUnderEach) {
  const std::vector<uint32_t> counts = {3, 1, 0, 2};
  const std::vector<float> gate = {2, 1, 0.5F, 0.5F}, idf = {1, 2, 3, 0.5F};
  const std::vector<uint8_t> mask = {0, 1};
  for (const Transform transform : kTransforms) {
    Signature out;
    ASSERT_TRUE(build_signature(transform, {.counts = counts, .gate = gate}, idf, mask, out));
    ASSERT_EQ(out.size(), 2U);
    EXPECT_NEAR(dot(out, out), 1, 1e-6) << to_string(transform);
    EXPECT_EQ(out[0] == 0, !uses_gates(transform));  // its count is 0, its gate sum is not
  }
}

TEST(Transform, MaskUnderEachPrefersTheLayerThatForetellsDecode) {
  // Layer 0 is noise, layer 1 the decode profile; gates say the same as counts, but for scale.
  std::vector<uint32_t> prefill, decode;
  std::vector<float> gate;
  Rng rng(4);
  constexpr size_t kRequests = 24;
  for (size_t i = 0; i < kRequests; ++i) {
    for (int e = 0; e < 8; ++e) {
      const bool own = e >= 4 && static_cast<size_t>(e - 4) == i % 4;
      const uint32_t count = e < 4 ? static_cast<uint32_t>(rng.below(9)) : own ? 9 : 0;
      prefill.push_back(count);
      gate.push_back(0.3F * static_cast<float>(count));
      decode.push_back(e < 4 ? 0 : count);
    }
  }
  const std::vector<float> idf(8, 1.5F);
  const auto pairs = draw_pairs(kRequests, 300, rng);
  for (const Transform transform : kTransforms) {
    const LayerMask mask = fit_layer_mask({.prefill_counts = prefill,
                                           .decode_counts = decode,
                                           .idf = idf,
                                           .layers = 2,
                                           .experts = 4,
                                           .transform = transform,
                                           .prefill_gate = gate},
                                          pairs);
    EXPECT_EQ(mask.mask, (std::vector<uint8_t>{0, 1})) << to_string(transform);
    EXPECT_NEAR(mask.peak_rho(), 1, 1e-6) << to_string(transform);
  }
}

}  // namespace
}  // namespace kindred::expert
