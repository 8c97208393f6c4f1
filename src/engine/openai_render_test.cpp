#include "engine/openai_render.h"
#include "base/json.h"

#include <gtest/gtest.h>

namespace kindred::engine {
namespace {

using json = Json;

std::string piece_of(Token token) { return token == 9 ? "\xf0\x9f" : "t" + std::to_string(token); }

struct Fixture {
  explicit Fixture(GenerationRequest request_in)
      : request(std::move(request_in)),
        renderer(request, {"id-1", 123, "tiny", "f00d"}, piece_of, std::vector<Token>{7, 8}) {}

  Fixture& token(Token id, std::string text, uint32_t choice = 0) {
    Output output;
    output.choice = choice;
    output.token = id;
    output.text = std::move(text);
    output.logprob = -0.5F;
    output.top = {{id, -0.5F}, {3, -INFINITY}};
    renderer.output(output, out);
    return *this;
  }
  Fixture& end(FinishReason reason, std::string_view text = "", uint32_t choice = 0) {
    renderer.choice_end(choice, reason, text, out);
    return *this;
  }
  Fixture& finish() {
    ResponseTail tail;
    tail.usage = {2, 1, renderer.completion_tokens()};
    renderer.finish(tail, out);
    return *this;
  }
  // The events before [DONE].
  std::vector<json> events() const {
    std::vector<json> list;
    size_t at = 0;
    while (at < out.size()) {
      const size_t stop = out.find("\n\n", at);
      EXPECT_EQ(out.substr(at, 6), "data: ");
      const std::string data = out.substr(at + 6, stop - at - 6);
      at = stop + 2;
      if (data == "[DONE]") {
        EXPECT_EQ(at, out.size());
        return list;
      }
      list.push_back(json::parse(data));
    }
    return list;
  }

  GenerationRequest request;
  ResponseRenderer renderer;
  std::string out;
};

GenerationRequest request_of(Api api, bool stream) {
  GenerationRequest request;
  request.api = api;
  request.stream = stream;
  return request;
}

TEST(Render, ChatStream) {
  Fixture f(request_of(Api::kChat, true));
  f.token(1, "he").token(2, "").token(3, "llo\n").end(FinishReason::kStop, "!").finish();
  const auto events = f.events();
  ASSERT_EQ(events.size(), 4U);  // role, two texts, end
  for (const json& event : events) {
    EXPECT_EQ(event["id"], "id-1");
    EXPECT_EQ(event["object"], "chat.completion.chunk");
    EXPECT_EQ(event["created"], 123);
    EXPECT_EQ(event["model"], "tiny");
    EXPECT_EQ(event["system_fingerprint"], "f00d");
    EXPECT_FALSE(event.contains("usage"));
  }
  EXPECT_EQ(events[0]["choices"][0]["delta"], json({{"role", "assistant"}, {"content", ""}}));
  EXPECT_EQ(events[1]["choices"][0]["delta"], json({{"content", "he"}}));
  EXPECT_TRUE(events[1]["choices"][0]["finish_reason"].is_null());
  EXPECT_EQ(events[2]["choices"][0]["delta"]["content"], "llo\n");
  EXPECT_EQ(events[3]["choices"][0]["delta"]["content"], "!");
  EXPECT_EQ(events[3]["choices"][0]["finish_reason"], "stop");
  EXPECT_TRUE(f.out.ends_with("data: [DONE]\n\n"));
}

TEST(Render, ClosingDeltaIsEmptyWithoutHeldText) {
  Fixture f(request_of(Api::kChat, true));
  f.token(1, "x").end(FinishReason::kLength).finish();
  EXPECT_EQ(f.events().back()["choices"][0]["delta"], json::object());
  EXPECT_EQ(f.events().back()["choices"][0]["finish_reason"], "length");
}

TEST(Render, IncludeUsageAddsALastEventAndNullsBefore) {
  GenerationRequest request = request_of(Api::kChat, true);
  request.include_usage = true;
  Fixture f(std::move(request));
  f.token(1, "x").end(FinishReason::kStop).finish();
  const auto events = f.events();
  for (size_t i = 0; i + 1 < events.size(); ++i) EXPECT_TRUE(events[i].at("usage").is_null());
  EXPECT_EQ(events.back()["choices"], json::array());
  EXPECT_EQ(events.back()["usage"], json({{"prompt_tokens", 2},
                                          {"completion_tokens", 1},
                                          {"total_tokens", 3},
                                          {"prompt_tokens_details", {{"cached_tokens", 1}}}}));
}

TEST(Render, ChatBody) {
  GenerationRequest request = request_of(Api::kChat, false);
  request.n = 2;
  request.sampling.logprobs = 2;
  request.return_token_ids = true;
  Fixture f(std::move(request));
  f.token(1, "a").token(9, "", 1).end(FinishReason::kStop, "b").token(4, "c", 1).end(FinishReason::kLength, "", 1);
  EXPECT_EQ(f.out, "");
  f.finish();
  const json body = json::parse(f.out);
  EXPECT_EQ(body["object"], "chat.completion");
  EXPECT_EQ(body["prompt_token_ids"], json({7, 8}));
  EXPECT_EQ(body["usage"]["completion_tokens"], 3);
  ASSERT_EQ(body["choices"].size(), 2U);
  EXPECT_EQ(body["choices"][0]["message"], json({{"role", "assistant"}, {"content", "ab"}}));
  EXPECT_EQ(body["choices"][1]["message"]["content"], "c");
  EXPECT_EQ(body["choices"][1]["token_ids"], json({9, 4}));
  const json first = body["choices"][1]["logprobs"]["content"][0];
  EXPECT_EQ(first["token"], "\xef\xbf\xbd\xef\xbf\xbd");  // half an emoji is not text, but its bytes are known
  EXPECT_EQ(first["bytes"], json({0xf0, 0x9f}));
  EXPECT_EQ(first["logprob"], -0.5);
  EXPECT_EQ(first["top_logprobs"].size(), 2U);
  EXPECT_EQ(first["top_logprobs"][1]["logprob"], -9999.0);
}

TEST(Render, CompletionStreamAndBodyAgree) {
  for (const bool stream : {true, false}) {
    GenerationRequest request = request_of(Api::kCompletions, stream);
    request.sampling.logprobs = 1;
    request.return_token_ids = true;
    Fixture f(std::move(request));
    f.token(1, "t1").token(12, "t12").end(FinishReason::kLength).finish();
    if (!stream) {
      const json choice = json::parse(f.out)["choices"][0];
      EXPECT_EQ(choice["text"], "t1t12");
      EXPECT_EQ(choice["logprobs"]["tokens"], json({"t1", "t12"}));
      EXPECT_EQ(choice["logprobs"]["token_logprobs"], json({-0.5, -0.5}));
      EXPECT_EQ(choice["logprobs"]["text_offset"], json({0, 2}));
      EXPECT_EQ(choice["logprobs"]["top_logprobs"][1], json({{"t12", -0.5}, {"t3", -9999.0}}));
      EXPECT_EQ(choice["prompt_token_ids"], json({7, 8}));
      EXPECT_EQ(choice["finish_reason"], "length");
      continue;
    }
    const auto events = f.events();
    ASSERT_EQ(events.size(), 3U);
    EXPECT_EQ(events[0]["object"], "text_completion");
    EXPECT_EQ(events[0]["choices"][0]["prompt_token_ids"], json({7, 8}));
    EXPECT_FALSE(events[1]["choices"][0].contains("prompt_token_ids"));
    EXPECT_EQ(events[1]["choices"][0]["text"], "t12");
    EXPECT_EQ(events[1]["choices"][0]["logprobs"]["text_offset"], json({2}));
    EXPECT_EQ(events[1]["choices"][0]["token_ids"], json({12}));
    EXPECT_EQ(events[2]["choices"][0]["token_ids"], json::array());
  }
}

// The point of resume(): two renderers in a row give what one gives.
TEST(Render, ResumedResponsesAreIdentical) {
  for (const Api api : {Api::kChat, Api::kCompletions}) {
    for (const bool stream : {true, false}) {
      GenerationRequest request = request_of(api, stream);
      request.n = 2;
      request.sampling.logprobs = 1;
      request.return_token_ids = true;
      request.include_usage = stream;
      Fixture whole(request), head(request), rest(request);
      const auto first = [](Fixture& f) { f.token(1, "a").token(2, "", 1).end(FinishReason::kStop, "z", 1); };
      const auto second = [](Fixture& f) { f.token(3, "b").end(FinishReason::kLength).finish(); };
      first(whole);
      second(whole);
      first(head);
      rest.renderer.resume(head.renderer.progress());
      second(rest);
      EXPECT_EQ(whole.out, head.out + rest.out);
    }
  }
}

TEST(Render, ExpertCountsComeInTheLastEvent) {
  expert::ExpertCounts counts(expert::ExpertShape{{0}, 4, 1});
  counts.tokens = 2;
  counts.data = {1, 1, 0, 0};
  for (const bool stream : {true, false}) {
    GenerationRequest request = request_of(Api::kChat, stream);
    request.return_expert_counts = true;
    request.return_expert_gates = true;
    Fixture f(std::move(request));
    f.token(1, "x").end(FinishReason::kStop);
    ResponseTail tail;
    tail.counts = counts;
    tail.decode_counts = counts;
    tail.gates = expert::ExpertGates{{0}, 4, {1, 0.5F, 0.5F, 0}};
    f.renderer.finish(tail, f.out);
    const json last = stream ? f.events().back() : json::parse(f.out);
    EXPECT_EQ(last["expert_counts"]["tokens"], 2);
    EXPECT_EQ(last["decode_expert_counts"]["experts"], 4);
    EXPECT_EQ(last["expert_gates"]["experts"], 4);
  }
}

TEST(Render, HostileTextStaysOneEvent) {
  Fixture f(request_of(Api::kChat, true));
  f.token(1, "\n\ndata: [DONE]\n\n\xff\"}").end(FinishReason::kStop).finish();
  EXPECT_EQ(f.events().size(), 3U);
  EXPECT_EQ(f.events()[1]["choices"][0]["delta"]["content"], "\n\ndata: [DONE]\n\n\xef\xbf\xbd\"}");
}

}  // namespace
}  // namespace kindred::engine
