#include "expert/counts.h"
#include "base/json.h"

#include <gtest/gtest.h>

#include "base/bytes.h"
#include "base/rng.h"

namespace kindred::expert {
namespace {

using json = Json;

ExpertCounts sample(uint32_t tokens) {
  ExpertCounts counts(ExpertShape{.layers = {0, 2}, .experts = 4, .top_k = 2});
  counts.tokens = tokens;
  counts.data = {tokens, tokens, 0, 0, 0, tokens, tokens - 1, 1};
  return counts;
}

TEST(ExpertCounts, RoundTripsOnTheWire) {
  for (const uint32_t tokens : {1U, 7U, 65'535U, 65'536U, 4'000'000'000U}) {
    const ExpertCounts counts = sample(tokens);
    const std::string wire = counts_to_json(counts);
    EXPECT_EQ(json::parse(wire)["dtype"], tokens <= 65'535 ? "u16" : "u32");
    const auto back = counts_from_json(wire);
    ASSERT_TRUE(back.ok()) << back.error().message;
    EXPECT_EQ(back->data, counts.data);
    EXPECT_EQ(back->shape, counts.shape);
    EXPECT_EQ(back->tokens, tokens);
  }
}

TEST(ExpertCounts, WireFormIsTheDocumentedOne) {
  const json wire = json::parse(counts_to_json(sample(3)));
  EXPECT_EQ(wire["v"], 1);
  EXPECT_EQ(wire["layers"], json({0, 2}));
  EXPECT_EQ(wire["experts"], 4);
  EXPECT_EQ(wire["top_k"], 2);
  EXPECT_EQ(wire["tokens"], 3);
  const auto bytes = base64_decode(wire["data"].get<std::string>());
  EXPECT_EQ(*bytes, (std::vector<uint8_t>{3, 0, 3, 0, 0, 0, 0, 0, 0, 0, 3, 0, 2, 0, 1, 0}));
}

TEST(ExpertCounts, SuffixIsCarriedAndIgnoredWhenRead) {
  const ExpertCounts suffix = sample(2);
  const std::string wire = counts_to_json(sample(9), &suffix);
  const auto whole = counts_from_json(wire);
  ASSERT_TRUE(whole.ok());
  EXPECT_EQ(whole->tokens, 9U);
  const auto tail = counts_from_json(json::parse(wire)["suffix"].dump());
  ASSERT_TRUE(tail.ok());
  EXPECT_EQ(tail->data, suffix.data);
}

TEST(ExpertCounts, ReadsInPlaceWithPadding) {
  const std::string wire = counts_to_json(sample(5));
  const std::string padded = wire + std::string(64, ' ');
  const auto back = counts_from_json(std::string_view(padded).substr(0, wire.size()), true);
  ASSERT_TRUE(back.ok());
  EXPECT_EQ(back->tokens, 5U);
}

TEST(ExpertCounts, RefusesWhatDoesNotFitTogether) {
  const json good = json::parse(counts_to_json(sample(5)));
  const std::vector<std::pair<const char*, json>> changes = {
      {"v", 2},
      {"v", nullptr},
      {"v", "1"},
      {"dtype", "u8"},
      {"dtype", "u32"},  // then there are too few bytes
      {"dtype", 16},
      {"layers", json::array()},
      {"layers", {2, 0}},
      {"layers", {1, 1}},
      {"layers", {0}},
      {"layers", {0, 1, 2}},
      {"layers", {-1, 2}},
      {"layers", {0, 2.5}},
      {"layers", {0, 4'294'967'296}},
      {"layers", "0,2"},
      {"experts", 0},
      {"experts", 5},
      {"experts", 4'000'000'000U},
      {"experts", 18'446'744'073'709'551'615U},
      {"experts", -4},
      {"top_k", 0},
      {"top_k", 1},
      {"top_k", 5},
      {"tokens", 4},
      {"tokens", 6},
      {"tokens", -5},
      {"tokens", 1e300},
      {"tokens", 4'294'967'296},
      {"data", ""},
      {"data", 5},
      {"data", "????????????????????????"},
      {"data", base64_encode(std::string(16, '\xff'))},
      {"data", base64_encode(std::string(17, '\0'))},
  };
  for (const auto& [field, value] : changes) {
    json bad = good;
    bad[field] = value;
    EXPECT_FALSE(counts_from_json(bad.dump()).ok()) << field << " = " << value;
    bad.erase(field);
    EXPECT_FALSE(counts_from_json(bad.dump()).ok()) << "no " << field;
  }
  for (const char* text : {"", "null", "[]", "{", "{}", "\"v\"", "{\"v\":1"}) {
    EXPECT_FALSE(counts_from_json(text).ok()) << text;
  }
}

TEST(ExpertCounts, CountAboveTokensIsRefusedThoughRowsSum) {
  ExpertCounts counts = sample(5);
  counts.data = {10, 0, 0, 0, 0, 5, 4, 1};
  ASSERT_TRUE(counts.rows_sum_to_tokens());
  EXPECT_FALSE(counts_from_json(counts_to_json(counts)).ok());
}

TEST(ExpertCounts, LimitHoldsBeforeAnythingIsAllocated) {
  EXPECT_FALSE(counts_from_json(counts_to_json(sample(5)), false, 7).ok());
  EXPECT_TRUE(counts_from_json(counts_to_json(sample(5)), false, 8).ok());
  json huge = json::parse(counts_to_json(sample(5)));
  huge["experts"] = 1U << 31;
  const auto refused = counts_from_json(huge.dump());
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, ErrorCode::kTooLarge);
}

TEST(ExpertCounts, SurvivesFlippedBytes) {
  const std::string wire = counts_to_json(sample(5));
  Rng rng(11);
  for (int i = 0; i < 3000; ++i) {
    std::string bent = wire;
    for (int flips = 0; flips < 2; ++flips) bent[rng.below(bent.size())] = static_cast<char>(rng.next());
    const auto counts = counts_from_json(bent);
    EXPECT_TRUE(!counts.ok() || counts->rows_sum_to_tokens());
  }
}

TEST(ExpertCounts, Adds) {
  ExpertCounts sum = sample(5);
  sum.add(sample(3));
  EXPECT_EQ(sum.tokens, 8U);
  EXPECT_EQ(sum.data, (std::vector<uint32_t>{8, 8, 0, 0, 0, 8, 6, 2}));
  EXPECT_TRUE(sum.rows_sum_to_tokens());
  sum.data[0] -= 1;
  EXPECT_FALSE(sum.rows_sum_to_tokens());
}

}  // namespace
}  // namespace kindred::expert
