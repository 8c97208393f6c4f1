#include "engine/text_assembler.h"

#include <gtest/gtest.h>

#include "base/bytes.h"
#include "base/rng.h"

namespace kindred::engine {
namespace {

struct Result {
  std::string text;
  bool stopped = false;
};

// Feeds the pieces; `restart`: goes on in a new assembler from the held bytes before every piece.
Result feed(const std::vector<std::string>& pieces, const std::vector<std::string>& stops, bool restart) {
  Result result;
  TextAssembler assembler(stops);
  for (const std::string& piece : pieces) {
    if (restart) assembler = TextAssembler(stops, std::string(assembler.held()));
    const auto step = assembler.append(piece);
    result.text += step.text;
    if (step.stopped) {
      result.stopped = true;
      EXPECT_TRUE(assembler.held().empty());
      return result;
    }
    EXPECT_EQ(utf8_complete_prefix(step.text), step.text.size()) << "half a character was given out";
  }
  result.text += assembler.finish();
  return result;
}

std::vector<std::string> cut(const std::string& text, size_t a, size_t b) {
  return {text.substr(0, a), text.substr(a, b - a), text.substr(b)};
}

TEST(TextAssembler, EverySplitGivesTheSameText) {
  struct Case {
    std::string text;
    std::vector<std::string> stops;
    Result expected;
  };
  const std::vector<Case> cases = {
      {"naïve 漢字 😀!", {}, {"naïve 漢字 😀!", false}},
      {"one\n\ntwo", {"\n\n"}, {"one", true}},
      {"one\n\ntwo", {"\n\n\n"}, {"one\n\ntwo", false}},
      {"aabaabaac", {"aabaac"}, {"aab", true}},  // the stop string overlaps itself
      {"x END", {"END", "ND"}, {"x ", true}},    // the earlier start wins
      {"日本語です。終わり", {"。終"}, {"日本語です", true}},
      {"stop at the end###", {"###"}, {"stop at the end", true}},
      {"never quite ##", {"###"}, {"never quite ##", false}},
      {"###", {"###"}, {"", true}},
      {"bad \xff\xfe bytes \xe6\xbc", {"zzz"}, {"bad \xff\xfe bytes \xe6\xbc", false}},  // comes out in the end
  };
  for (const Case& each : cases) {
    for (size_t a = 0; a <= each.text.size(); ++a) {
      for (size_t b = a; b <= each.text.size(); ++b) {
        for (const bool restart : {false, true}) {
          const Result result = feed(cut(each.text, a, b), each.stops, restart);
          ASSERT_EQ(result.text, each.expected.text) << each.text << " at " << a << ", " << b;
          ASSERT_EQ(result.stopped, each.expected.stopped) << each.text << " at " << a << ", " << b;
        }
      }
    }
  }
}

TEST(TextAssembler, RandomTextsOfFewLettersByByteAndWhole) {
  Rng rng(5);
  for (int round = 0; round < 3000; ++round) {
    const auto letters = [&](size_t size) {
      std::string text;
      for (size_t i = 0; i < size; ++i) text += static_cast<char>('a' + rng.below(2));
      return text;
    };
    const std::string text = letters(rng.below(24));
    const std::string stop = letters(1 + rng.below(5));
    std::vector<std::string> bytes;
    for (const char c : text) bytes.emplace_back(1, c);
    const size_t at = text.find(stop);
    const Result result = feed(bytes, {stop}, round % 2 == 0);
    ASSERT_EQ(result.stopped, at != std::string::npos) << text << " / " << stop;
    ASSERT_EQ(result.text, text.substr(0, at)) << text << " / " << stop;
  }
}

TEST(TextAssembler, HoldsNoMoreThanItMust) {
  TextAssembler assembler({"STOP"});
  EXPECT_EQ(assembler.append("text S").text, "text ");
  EXPECT_EQ(assembler.held(), "S");
  EXPECT_EQ(assembler.append("TO").text, "");
  EXPECT_EQ(assembler.append("x").text, "STOx");
  EXPECT_EQ(assembler.held(), "");
  EXPECT_EQ(assembler.append("\xe6\xbc").text, "");
  EXPECT_EQ(assembler.append("\xa2").text, "漢");
}

}  // namespace
}  // namespace kindred::engine
