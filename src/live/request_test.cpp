#include "live/request.h"

#include <gtest/gtest.h>

#include "live/prompt.h"
#include "live/render.h"

namespace kindred::live {
namespace {

RequestLimits limits() {
  RequestLimits out;
  out.model = "m";
  out.context_tokens = 64;
  out.default_output_tokens = 10;
  out.piece_tokens = 4;
  return out;
}

TEST(LiveRequest, ReadsChat) {
  const auto got = parse_live_request(
      true, R"({"model":"m","messages":[{"role":"user","content":"eight by"}],"max_tokens":7,"stream":true})",
      limits());
  ASSERT_TRUE(got.ok()) << got.error().message;
  EXPECT_EQ(got->prompt_tokens(), 4U);  // role, two tokens of text, assistant's role
  EXPECT_EQ(got->output_tokens, 7U);
  EXPECT_TRUE(got->limited);
  EXPECT_TRUE(got->stream);
  EXPECT_EQ(got->pieces.size(), 1U);
}

TEST(LiveRequest, WithoutALimitAnswersEndByThemselves) {
  const auto got = parse_live_request(false, R"({"prompt":"abcd"})", limits());
  ASSERT_TRUE(got.ok());
  EXPECT_EQ(got->output_tokens, 10U);
  EXPECT_FALSE(got->limited);
}

TEST(LiveRequest, EqualBeginningsHaveEqualPieces) {
  const auto one = parse_live_request(false, R"({"prompt":"0123456789abcdef and then this"})", limits());
  const auto two = parse_live_request(false, R"({"prompt":"0123456789abcdef but also that"})", limits());
  ASSERT_TRUE(one.ok() && two.ok());
  ASSERT_GE(one->pieces.size(), 1U);
  EXPECT_EQ(one->pieces[0], two->pieces[0]);
  EXPECT_NE(one->hash, two->hash);
}

struct BadRequest {
  const char* body;
  const char* field;
  int status;
};

class LiveRequestRefuses : public ::testing::TestWithParam<BadRequest> {};

TEST_P(LiveRequestRefuses, NamesTheField) {
  const auto got = parse_live_request(false, GetParam().body, limits());
  ASSERT_FALSE(got.ok());
  EXPECT_EQ(got.error().field, GetParam().field);
  EXPECT_EQ(api_failure(got.error()).status, GetParam().status);
  const Json body = parse_json(failure_body(api_failure(got.error())));
  EXPECT_FALSE(body["error"]["message"].get<std::string>().empty());
}

INSTANTIATE_TEST_SUITE_P(
    All, LiveRequestRefuses,
    ::testing::Values(BadRequest{"not json", "", 400}, BadRequest{"[]", "", 400}, BadRequest{"{}", "prompt", 400},
                      BadRequest{R"({"prompt":""})", "prompt", 400},
                      BadRequest{R"({"prompt":["a","b"]})", "prompt", 400},
                      BadRequest{R"({"prompt":[-1]})", "prompt", 400}, BadRequest{R"({"prompt":"a","n":2})", "n", 400},
                      BadRequest{R"({"prompt":"a","max_tokens":0})", "max_tokens", 400},
                      BadRequest{R"({"prompt":"a","max_tokens":64})", "max_tokens", 400},
                      BadRequest{R"({"prompt":"a","stream":1})", "stream", 400},
                      BadRequest{R"({"prompt":"a","model":"other"})", "model", 404},
                      BadRequest{R"({"prompt":"a","bootstrap_room":-1})", "bootstrap_room", 400},
                      BadRequest{R"({"prompt":"a","kv_transfer_params":3})", "kv_transfer_params", 400}));

TEST(LiveRequest, APromptAsLongAsTheContextIsRefused) {
  const std::string body = R"({"prompt":")" + std::string(256, 'x') + "\"}";
  const auto got = parse_live_request(false, body, limits());
  ASSERT_FALSE(got.ok());
  EXPECT_EQ(api_failure(got.error()).code, "context_length_exceeded");
}

TEST(LiveAnswer, StreamedAndWholeAnswersHaveTheSameWords) {
  auto request = parse_live_request(
      true, R"({"messages":[{"role":"user","content":"hello"}],"max_tokens":5,"stream":true})", limits());
  ASSERT_TRUE(request.ok());
  const Renderer renderer(*request, {.id = "x", .created = 1, .model = "m"});
  std::string events, streamed;
  for (uint32_t i = 0; i < 5; ++i) renderer.token(i, events);
  renderer.end({}, events);
  EXPECT_TRUE(events.ends_with("data: [DONE]\n\n"));
  for (size_t at = 0; (at = events.find("data: {", at)) != std::string::npos;) {
    const size_t end = events.find("\n\n", at);
    const Json event = parse_json(events.substr(at + 6, end - at - 6));
    ASSERT_TRUE(event.is_object());
    streamed += event["choices"][0]["delta"].value("content", "");
    at = end;
  }
  const Json whole = parse_json(renderer.whole({}));
  EXPECT_EQ(whole["choices"][0]["message"]["content"], streamed);
  EXPECT_EQ(whole["choices"][0]["finish_reason"], "length");
  EXPECT_EQ(whole["usage"]["completion_tokens"], 5);
}

}  // namespace
}  // namespace kindred::live
