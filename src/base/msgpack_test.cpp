#include "base/msgpack.h"

#include <gtest/gtest.h>

#include "base/json.h"
#include "base/rng.h"

namespace kindred {
namespace {

std::vector<uint8_t> packed(const Json& value) { return Json::to_msgpack(value); }

TEST(Msgpack, ReadsEveryKind) {
  const auto bytes = packed(
      {{"n", nullptr}, {"b", true}, {"i", -3}, {"u", UINT64_MAX}, {"r", 0.5}, {"t", "text"}, {"a", {1, {2, 3}, 4}}});
  const auto read = MsgpackDocument::parse(bytes);
  ASSERT_TRUE(read.ok());
  const auto at = [&](const char* key) { return *read->member(read->root(), key); };
  EXPECT_EQ(read->kind(at("n")), MsgpackDocument::Kind::kNull);
  EXPECT_EQ(read->integer(at("i")), static_cast<uint64_t>(-3));
  EXPECT_FALSE(read->unsigned_integer(at("i")));
  EXPECT_EQ(read->unsigned_integer(at("u")), UINT64_MAX);
  EXPECT_EQ(read->number(at("r")), 0.5);
  EXPECT_EQ(read->number(at("i")), -3.0);
  EXPECT_EQ(read->number(at("u")), 0x1p64);
  EXPECT_FALSE(read->number(at("t")));
  EXPECT_EQ(read->text(at("t")), "text");
  EXPECT_EQ(read->size(at("a")), 3U);
  EXPECT_EQ(read->integer(*read->element(at("a"), 2)), 4U);
  EXPECT_FALSE(read->element(at("a"), 3));
  EXPECT_FALSE(read->member(read->root(), "x"));
}

TEST(Msgpack, BoundsBytesValuesAndDepth) {
  const auto flat = packed(Json::array({1, 2, 3, 4}));
  EXPECT_TRUE(MsgpackDocument::parse(flat, {.bytes = flat.size(), .values = 5}).ok());
  EXPECT_EQ(MsgpackDocument::parse(flat, {.values = 4}).error().code, ErrorCode::kTooLarge);
  EXPECT_EQ(MsgpackDocument::parse(flat, {.bytes = flat.size() - 1}).error().code, ErrorCode::kTooLarge);
  // A million arrays in each other, in as many bytes.
  const std::vector<uint8_t> deep(1'000'000, 0x91);
  EXPECT_EQ(MsgpackDocument::parse(deep).error().code, ErrorCode::kTooLarge);
  // Four thousand million elements that are not there.
  const std::vector<uint8_t> hollow = {0xdd, 0xff, 0xff, 0xff, 0xff};
  EXPECT_EQ(MsgpackDocument::parse(hollow).error().code, ErrorCode::kCorrupt);
}

TEST(Msgpack, RefusesWhatIsCutOrFollowedBySomething) {
  auto bytes = packed({{"a", {1, 2, "three"}}});
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(MsgpackDocument::parse(std::span(bytes).first(size)).ok());
  }
  bytes.push_back(0xc0);
  EXPECT_FALSE(MsgpackDocument::parse(bytes).ok());
}

TEST(Msgpack, AnyBytesAreReadOrRefused) {
  Rng rng(1);
  const auto good = packed({{"a", {1, -2, 0.5, "three", nullptr, {{"k", true}}}}, {"b", std::string(300, 'x')}});
  for (int i = 0; i < 20'000; ++i) {
    auto bytes = good;
    for (uint64_t n = 0; n < 1 + rng.below(4); ++n) bytes[rng.below(bytes.size())] = static_cast<uint8_t>(rng.next());
    const auto read = MsgpackDocument::parse(bytes);
    if (!read) continue;
    std::string canonical;
    read->append_canonical(read->root(), canonical);
    EXPECT_FALSE(canonical.empty());
  }
}

}  // namespace
}  // namespace kindred
