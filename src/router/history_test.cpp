// What is read out of SGLang's answers, and what is kept of it.
#include "router/history.h"

#include <gtest/gtest.h>

#include <fmt/format.h>

#include <functional>

#include "base/bytes.h"
#include "base/rng.h"
#include "router/prompt_prefix.h"

namespace kindred::router {
namespace {

using Fault = RoutedExpertsReader::Fault;
constexpr RoutedShape kShape = {.layers = 3, .experts = 8, .top_k = 2};

// [tokens, 3, 2] int32 as the wire has it. Layer 0 has no experts; layer 1 takes `expert(t)` and the one after it,
// layer 2 experts 6 and 7.
std::string routed(size_t tokens, const std::function<int32_t(size_t)>& expert) {
  std::string bytes;
  const auto put = [&](int32_t id) {
    for (int shift = 0; shift < 32; shift += 8) bytes += static_cast<char>(static_cast<uint32_t>(id) >> shift);
  };
  for (size_t t = 0; t < tokens; ++t) {
    for (const int32_t id : {0, 0, expert(t), expert(t) + 1, 6, 7}) put(id);
  }
  return base64_encode(bytes);
}
std::string routed(size_t tokens, int32_t expert = 2) {
  return routed(tokens, [=](size_t) { return expert; });
}

std::string chat_reply(const std::string& experts, int prompt_tokens) {
  return fmt::format(
      R"({{"id":"a","object":"chat.completion","created":1,"model":"m","choices":[{{"index":0,"message":{{"role":)"
      R"("assistant","content":"x \"routed_experts\":\"AAAA\" y"}},"finish_reason":"length"}}],"usage":)"
      R"({{"prompt_tokens":{},"total_tokens":9,"completion_tokens":1,"prompt_tokens_details":null}},"metadata":)"
      R"({{"weight_version":"default"}},"sglext":{{"routed_experts":"{}"}}}})",
      prompt_tokens, experts);
}

std::string chat_events(const std::string& experts, int prompt_tokens) {
  const std::string head = R"({"id":"a","object":"chat.completion.chunk","created":1,"model":"m",)";
  return fmt::format(
      "data: "
      "{0}\"choices\":[{{\"index\":0,\"delta\":{{\"role\":\"assistant\",\"content\":\"\"}}}}],\"usage\":null}}\n\n"
      "data: {0}\"choices\":[],\"usage\":null,\"sglext\":{{\"routed_experts\":\"{1}\"}}}}\n\n"
      "data: {0}\"choices\":[],\"usage\":{{\"prompt_tokens\":{2},\"total_tokens\":9}}}}\n\ndata: [DONE]\n\n",
      head, experts, prompt_tokens);
}

std::string generate_reply(const std::string& experts, int prompt_tokens) {
  return fmt::format(R"({{"text": "y", "meta_info": {{"id": "a", "prompt_tokens": {}, "routed_experts" : "{}"}}}})",
                     prompt_tokens, experts);
}

Result<RoutedExperts> read(std::string_view answer, size_t piece = SIZE_MAX, Fault* fault = nullptr) {
  RoutedExpertsReader reader(kShape);
  for (size_t at = 0; at < answer.size(); at += std::min(piece, answer.size() - at))
    reader.feed(answer.substr(at, piece));
  Result<RoutedExperts> out = reader.take();
  if (fault != nullptr) *fault = reader.fault();
  return out;
}

TEST(RoutedExperts, AreReadFromEachOfTheFormsInPiecesOfAnySize) {
  for (const auto& answer : {chat_reply(routed(40), 40), chat_events(routed(40), 40), generate_reply(routed(40), 40)}) {
    for (const size_t piece : {size_t{1}, size_t{7}, answer.size()}) {
      const Result<RoutedExperts> got = read(answer, piece);
      ASSERT_TRUE(got.ok()) << got.error().message << "\n" << answer;
      EXPECT_EQ(got->tokens, 40U);
      EXPECT_EQ(got->shape, (expert::ExpertShape{.layers = {1, 2}, .experts = 8, .top_k = 2}));
      ASSERT_EQ(got->prefixes.size(), 2U);  // of 32 tokens, and of all
      EXPECT_EQ(got->prefixes[0].tokens, 32U);
      EXPECT_EQ(got->prefixes[1].cells, (std::vector<uint16_t>{0, 0, 40, 40, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 40, 40}));
    }
  }
}

TEST(RoutedExperts, PrefixesAreCumulativeAndEachHalfAsLongAgain) {
  const Result<RoutedExperts> got = read(chat_reply(routed(120, [](size_t t) { return t < 48 ? 2 : 4; }), 120));
  ASSERT_TRUE(got.ok()) << got.error().message;
  std::vector<uint64_t> tokens;
  for (const PrefixCounts& prefix : got->prefixes) {
    tokens.push_back(prefix.tokens);
    EXPECT_EQ(prefix.cells[2], std::min<uint64_t>(prefix.tokens, 48));
    EXPECT_EQ(prefix.cells[4], prefix.tokens - std::min<uint64_t>(prefix.tokens, 48));
  }
  EXPECT_EQ(tokens, (std::vector<uint64_t>{32, 48, 72, 108, 120}));
}

TEST(RoutedExperts, WhatIsWrongIsNamedAndGivesNothing) {
  const std::string good = routed(4);
  std::string late_layer = routed(4), half = routed(4);
  const std::vector<std::tuple<std::string, Fault, std::string>> cases = {
      {R"({"choices":[],"usage":{"prompt_tokens":4}})", Fault::kMissing, "no routed_experts"},
      {R"({"sglext":{"routed_experts":null}})", Fault::kMissing, "no routed_experts"},
      {R"({"sglext":{"routed_experts":7}})", Fault::kMissing, "no routed_experts"},
      {chat_reply("", 4), Fault::kTokens, "no tokens"},
      {chat_reply(good, 5), Fault::kTokens, "4 tokens by this shape, and the prompt 5"},
      {chat_reply(routed(40), 20), Fault::kTokens, "is it 3 layers"},  // as with a shape of half the layers
      {chat_reply(good.substr(0, good.size() - 16), 4), Fault::kTokens, "no whole number of tokens"},
      {chat_reply(good.substr(0, good.size() - 3), 4), Fault::kEncoding, "its end is missing"},
      {chat_reply("AA*A" + good, 4), Fault::kEncoding, "not base64"},
      {chat_reply("AA==" + good, 4), Fault::kEncoding, "not base64"},
      {chat_reply("A===", 4), Fault::kEncoding, "not base64"},
      {chat_reply(routed(4, 7), 4), Fault::kExpert, "token 0, layer 1: expert 8 of 8"},
      {chat_reply(routed(4, -1), 4), Fault::kExpert, "expert -1 of 8"},
      {chat_reply(base64_encode(std::string("\0\0\0\0\0\0\0\0\3\0\0\0\3\0\0\0", 16)), 1), Fault::kExpert,
       "expert 3 twice"},
      {chat_reply(base64_encode(std::string(24 * 4, '\0')), 4), Fault::kLayers, "no layer has experts"},
      {chat_reply(base64_encode(std::string(24, '\0')) + routed(3), 4), Fault::kLayers, "layer 1 has experts for some"},
      {R"({"usage":{"prompt_tokens":4},"sglext":{"routed_experts":")" + good, Fault::kCut, "ends inside"},
  };
  for (const auto& [answer, fault, why] : cases) {
    for (const size_t piece : {size_t{3}, SIZE_MAX}) {
      Fault seen = Fault::kNone;
      const Result<RoutedExperts> got = read(answer, piece, &seen);
      ASSERT_FALSE(got.ok()) << answer;
      EXPECT_EQ(seen, fault) << RoutedExpertsReader::to_string(seen) << "\n" << answer;
      EXPECT_NE(got.error().message.find(why), std::string::npos) << got.error().message;
    }
  }
}

TEST(RoutedExperts, LongPromptsAreCountedAsFarAsCountsFit) {
  constexpr size_t kTokens = RoutedExpertsReader::kCountedTokens + 100;
  const Result<RoutedExperts> got = read(chat_reply(routed(kTokens), kTokens));
  ASSERT_TRUE(got.ok()) << got.error().message;
  EXPECT_EQ(got->tokens, kTokens);
  EXPECT_EQ(got->prefixes.back().tokens, RoutedExpertsReader::kCountedTokens);
  EXPECT_EQ(got->prefixes.back().cells[2], RoutedExpertsReader::kCountedTokens);
}

TEST(RoutedExperts, NoiseDoesNoHarm) {
  Rng rng(1);
  const std::string whole = chat_events(routed(40), 40);
  for (int round = 0; round < 3'000; ++round) {
    std::string answer = whole;
    for (int i = 0; i < 3; ++i) answer[rng.below(answer.size())] = static_cast<char>(rng.below(256));
    const Result<RoutedExperts> got = read(answer.substr(0, rng.below(answer.size() + 1)), 1 + rng.below(64));
    if (!got.ok()) continue;
    for (const PrefixCounts& prefix : got->prefixes) {
      uint64_t sum = 0;
      for (const uint16_t count : prefix.cells) sum += count;
      EXPECT_EQ(sum, prefix.tokens * got->shape.layers.size() * got->shape.top_k);
    }
  }
}

TEST(RoutedExperts, Shapes) {
  EXPECT_EQ(parse_routed_shape("48x128x8"), (RoutedShape{.layers = 48, .experts = 128, .top_k = 8}));
  for (const char* text : {"", "48", "48x128", "48x128x", "48x128x8x1", "0x1x1", "4x8x9", "-1x8x2", "4096x4096x2",
                           "48 x128x8", "48x128x8 "}) {
    EXPECT_FALSE(parse_routed_shape(text)) << text;
  }
}

class HistoryTest : public ::testing::Test {
 protected:
  explicit HistoryTest(size_t bytes = 1 << 20)
      : history_(*History::make({.shapes = {"3x8x2", "other=2x4x1"}, .bytes = bytes})) {}

  static std::string prompt(const std::string& topic, size_t pieces, const std::string& end = {}) {
    std::string text;
    while (text.size() < pieces * kPieceBytes) text += topic + " ";
    return text.substr(0, pieces * kPieceBytes) + end;
  }
  static HistoryKey key(const std::string& text) { return History::key("m", "f", text); }
  bool learn(const std::string& text, const std::string& answer) {
    RoutedExpertsReader reader(kShape);
    reader.feed(answer);
    return history_->learn(key(text), reader).ok();
  }
  KnownPrefix find(const std::string& text, double least = 0) { return history_->find(key(text), least); }
  bool has(const std::string& line) { return history_->metrics().find(line + "\n") != std::string::npos; }

  std::unique_ptr<History> history_;
};

TEST_F(HistoryTest, TheLongestKnownPrefixIsFound) {
  EXPECT_EQ(find(prompt("a", 10)).counts, nullptr);
  // 400 tokens of 40 to a piece; the first half of another kind than the second.
  ASSERT_TRUE(learn(prompt("a", 10, "tail"), chat_reply(routed(400, [](size_t t) { return t < 200 ? 2 : 4; }), 400)));
  const KnownPrefix whole = find(prompt("a", 10, "another tail"));
  ASSERT_NE(whole.counts, nullptr);
  EXPECT_TRUE(whole.counts->rows_sum_to_tokens());
  EXPECT_EQ(whole.counts->tokens, 400U);
  EXPECT_EQ(whole.counts->row(0)[2], 200U);
  EXPECT_GT(whole.share, 0.99);
  // Longer prompts that go on from it, and such as leave it half way.
  EXPECT_EQ(find(prompt("a", 10) + prompt("b", 10)).counts->tokens, 400U);
  const KnownPrefix part = find(prompt("a", 5) + prompt("b", 5));
  ASSERT_NE(part.counts, nullptr);
  EXPECT_EQ(part.counts->tokens, 162U);  // the longest that was kept below 200
  EXPECT_EQ(part.counts->row(0)[4], 0U);
  EXPECT_NEAR(part.share, 0.4, 0.01);
  EXPECT_EQ(find(prompt("a", 5) + prompt("b", 5), 0.5).counts, nullptr);
  EXPECT_EQ(find(prompt("b", 10)).counts, nullptr);
  EXPECT_EQ(history_->find(History::key("m", "another version", prompt("a", 10)), 0).counts, nullptr);
  EXPECT_EQ(history_->find(History::key("n", "f", prompt("a", 10)), 0).counts, nullptr);
  EXPECT_TRUE(has(R"(kindred_router_history_lookups_total{result="hit"} 3)"));
  EXPECT_TRUE(has(R"(kindred_router_history_lookups_total{result="short"} 1)"));
  EXPECT_TRUE(has(R"(kindred_router_history_lookups_total{result="miss"} 4)"));
  EXPECT_TRUE(has("kindred_router_history_learned_total 1"));
}

TEST_F(HistoryTest, WhatIsWrongIsCountedAndNothingIsKept) {
  EXPECT_FALSE(learn(prompt("a", 10), chat_reply(routed(400, 7), 400)));
  EXPECT_FALSE(learn(prompt("a", 10), chat_reply(routed(400), 399 - 20)));
  EXPECT_FALSE(learn(prompt("a", 10), "{}"));
  EXPECT_EQ(history_->entries(), 0U);
  EXPECT_EQ(history_->bytes(), 0U);
  for (const char* reason : {"expert", "tokens", "missing"}) {
    EXPECT_TRUE(has(fmt::format(R"(kindred_router_history_refused_total{{reason="{}"}} 1)", reason))) << reason;
  }
}

class SmallHistory : public HistoryTest {
 protected:
  SmallHistory() : HistoryTest(4'096) {}
};

TEST_F(SmallHistory, StaysWithinItsBytesAndForgetsWhatWasUsedLongestAgo) {
  for (int i = 0; i < 40; ++i) {
    ASSERT_TRUE(learn(prompt(fmt::format("topic {}", i), 10), chat_reply(routed(400), 400)));
    EXPECT_LE(history_->bytes(), 4'096U);
    EXPECT_NE(find(prompt("topic 0", 10)).counts, nullptr) << i;  // it is used all the time
  }
  EXPECT_EQ(find(prompt("topic 20", 10)).counts, nullptr);
  EXPECT_NE(find(prompt("topic 39", 10)).counts, nullptr);
  EXPECT_EQ(history_->bytes() % (History::kEntryBytes + 2 * 16), 0U);
  EXPECT_EQ(history_->bytes(), history_->entries() * (History::kEntryBytes + 2 * 16));
  // Learning the same again takes no more room.
  const size_t before = history_->bytes();
  ASSERT_TRUE(learn(prompt("topic 39", 10), chat_reply(routed(400), 400)));
  EXPECT_EQ(history_->bytes(), before);
}

TEST_F(HistoryTest, AsksAboutAShareOfWhatIsNotKnown) {
  int asked = 0;
  for (int i = 0; i < 1'000; ++i) asked += history_->asks(0, 0.25) ? 1 : 0;
  EXPECT_EQ(asked, 250);
  EXPECT_FALSE(history_->asks(0.95, 1));
  EXPECT_TRUE(history_->asks(0.5, 1));
  EXPECT_FALSE(history_->asks(0, 0));
}

TEST_F(HistoryTest, ShapesByModel) {
  EXPECT_EQ(history_->shape("other")->layers, 2U);
  EXPECT_EQ(history_->shape("m")->layers, 3U);
  const auto only = *History::make({.shapes = {"other=2x4x1"}});
  EXPECT_FALSE(only->shape("m"));
  EXPECT_EQ(*History::make({}), nullptr);
  for (const std::vector<std::string>& shapes :
       {std::vector<std::string>{"3x8"}, {"3x8x2", "4x8x2"}, {"m=", "3x8x2"}}) {
    const auto made = History::make({.shapes = shapes});
    ASSERT_FALSE(made.ok());
    EXPECT_EQ(made.error().field, "history_shape");
  }
}

}  // namespace
}  // namespace kindred::router
