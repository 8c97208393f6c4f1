#include "sim/length_mix.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>

namespace kindred::sim {
namespace {

// Prompts of 1 to 1,600, a hundredth beyond the range left out, outputs that tell which request it was.
std::vector<TraceRequest> ramp() {
  std::vector<TraceRequest> out;
  for (uint32_t i = 0; i < 1600; ++i) out.push_back({.prompt_tokens = i + 1, .output_tokens = i + 1});
  return out;
}

// Share of requests in each quarter of the range.
std::array<double, 4> quarters(LengthMix mix) {
  const auto drawn = reshape(ramp(), {.mix = mix, .requests = 8000, .seed = 5});
  std::array<double, 4> out{};
  EXPECT_TRUE(drawn);
  for (const TraceRequest& request : *drawn) {
    EXPECT_EQ(request.prompt_tokens, request.output_tokens);  // still of one request
    EXPECT_LE(request.prompt_tokens, 1584U);
    out.at((request.prompt_tokens - 1) * 4 / 1584) += 1.0 / 8000;
  }
  return out;
}

TEST(LengthMix, EachHasItsShape) {
  // Of the weights in length_mix.h, summed over a quarter's four parts.
  const std::array<std::pair<LengthMix, std::array<double, 4>>, 5> expected = {{
      {LengthMix::kRandom, {0.25, 0.25, 0.25, 0.25}},
      {LengthMix::kAverage, {0.25, 0.25, 0.25, 0.25}},
      {LengthMix::kDescending, {0.4375, 0.3125, 0.1875, 0.0625}},
      {LengthMix::kCentral, {0.0898, 0.4102, 0.4102, 0.0898}},
      {LengthMix::kTwoEnd, {0.4102, 0.0898, 0.0898, 0.4102}},
  }};
  for (const auto& [mix, shares] : expected) {
    const std::array<double, 4> got = quarters(mix);
    for (size_t q = 0; q < 4; ++q) EXPECT_NEAR(got.at(q), shares.at(q), 0.02) << to_string(mix) << " " << q;
  }
}

TEST(LengthMix, RandomKeepsTheTracesOrder) {
  const auto drawn = reshape(ramp(), {.mix = LengthMix::kRandom, .requests = 500, .seed = 3});
  ASSERT_TRUE(drawn);
  for (size_t i = 1; i < drawn->size(); ++i) {
    const uint32_t before = (*drawn)[i - 1].prompt_tokens;
    EXPECT_EQ((*drawn)[i].prompt_tokens, before == 1584 ? 1 : before + 1);
  }
}

TEST(LengthMix, EqualSeedsGiveEqualRequests) {
  for (const std::string_view name : length_mix_names()) {
    const LengthMix mix = *parse_length_mix(name);
    const auto lengths = [&](uint64_t seed) {
      std::vector<uint32_t> out;
      const auto drawn = reshape(ramp(), {.mix = mix, .requests = 50, .seed = seed});
      for (const TraceRequest& request : *drawn) out.push_back(request.prompt_tokens);
      return out;
    };
    EXPECT_EQ(lengths(1), lengths(1)) << name;
    EXPECT_NE(lengths(1), lengths(2)) << name;
  }
}

TEST(LengthMix, ScalesToAShorterContext) {
  const auto drawn = reshape(ramp(), {.mix = LengthMix::kAverage, .longest_prompt_tokens = 100, .seed = 1});
  ASSERT_TRUE(drawn);
  uint32_t longest = 0;
  for (const TraceRequest& request : *drawn) {
    EXPECT_GE(request.prompt_tokens, 1U);
    longest = std::max(longest, request.prompt_tokens);
  }
  EXPECT_GT(longest, 95U);
  EXPECT_LE(longest, 100U);
}

TEST(LengthMix, WrongInputIsNamed) {
  EXPECT_EQ(reshape({}, {}).error().field, "trace");
  EXPECT_EQ(reshape(ramp(), {.requests = 0}).error().field, "requests");
  const auto wrong = parse_length_mix("middling");
  ASSERT_FALSE(wrong);
  EXPECT_NE(wrong.error().message.find("two-end"), std::string::npos);
}

}  // namespace
}  // namespace kindred::sim
