#include "engine/openai_request.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "engine/openai_error.h"

namespace kindred::engine {
namespace {

constexpr RequestLimits kLimits{"tiny", 1000};

Result<GenerationRequest> chat(const std::string& fields) {
  return parse_generation_request(
      Api::kChat, R"({"model":"tiny","messages":[{"role":"user","content":"hi"}])" + fields + "}", kLimits);
}

Result<GenerationRequest> completion(const std::string& fields) {
  return parse_generation_request(Api::kCompletions, R"({"model":"tiny")" + fields + "}", kLimits);
}

TEST(OpenaiRequest, DefaultsAreOpenAis) {
  const auto r = chat("");
  ASSERT_TRUE(r.ok());
  EXPECT_EQ(r->messages.size(), 1U);
  EXPECT_EQ(r->n, 1U);
  EXPECT_FALSE(r->stream);
  EXPECT_FALSE(r->max_tokens);
  EXPECT_FALSE(r->seed);
  EXPECT_EQ(r->sampling.temperature, 1.0);
  EXPECT_EQ(r->sampling.top_p, 1.0);
  EXPECT_EQ(r->sampling.logprobs, -1);
  EXPECT_TRUE(r->cache_prompt);
}

TEST(OpenaiRequest, ReadsEveryField) {
  const auto r = chat(
      R"(,"stream":true,"stream_options":{"include_usage":true},"n":3,"stop":["a","bc"],"max_tokens":5,)"
      R"("max_completion_tokens":7,"min_tokens":2,"temperature":0,"top_p":0.5,"seed":-1,"presence_penalty":-2,)"
      R"("frequency_penalty":2,"repetition_penalty":1.1,"logit_bias":{"5":-100,"999":3.5},"logprobs":true,)"
      R"("top_logprobs":4,"ignore_eos":true,"return_token_ids":true,"return_expert_counts":true,"return_expert_gates":true,)"
      R"("cache_prompt":false,"user":"someone","unknown":{"a":[1]},"tools":[],"tool_choice":"none",)"
      R"("response_format":{"type":"text"},"kv_transfer_params":null)");
  ASSERT_TRUE(r.ok()) << r.error().message;
  EXPECT_TRUE(r->stream && r->include_usage);
  EXPECT_EQ(r->n, 3U);
  EXPECT_EQ(r->stop, (std::vector<std::string>{"a", "bc"}));
  EXPECT_EQ(r->max_tokens, 7U);
  EXPECT_EQ(r->seed, ~0ULL);
  EXPECT_EQ(r->sampling.min_tokens, 2U);
  EXPECT_EQ(r->sampling.temperature, 0);
  EXPECT_EQ(r->sampling.top_p, 0.5);
  EXPECT_EQ(r->sampling.presence_penalty, -2);
  EXPECT_EQ(r->sampling.frequency_penalty, 2);
  EXPECT_EQ(r->sampling.repetition_penalty, 1.1);
  EXPECT_EQ(r->sampling.logit_bias, (std::vector<std::pair<Token, double>>{{5, -100}, {999, 3.5}}));
  EXPECT_EQ(r->sampling.logprobs, 4);
  EXPECT_TRUE(r->sampling.ignore_eos && r->return_token_ids && r->return_expert_counts);
  EXPECT_TRUE(r->return_expert_gates);
  EXPECT_FALSE(r->cache_prompt);
}

TEST(OpenaiRequest, ReadsMessages) {
  const auto r = parse_generation_request(
      Api::kChat,
      R"({"messages":[{"role":"developer","content":"d"},{"role":"user","content":[{"type":"text","text":"a"},)"
      R"({"type":"text","text":"b"}]},{"role":"assistant","content":"","tool_calls":null,"name":"x"}]})",
      kLimits);
  ASSERT_TRUE(r.ok()) << r.error().message;
  EXPECT_EQ(r->messages[0].role, "system");
  EXPECT_EQ(r->messages[1].content, "a\nb");
  EXPECT_EQ(r->messages[2].content, "");
}

TEST(OpenaiRequest, ReadsPrompts) {
  EXPECT_EQ(completion(R"(,"prompt":"hi")")->prompt_text, "hi");
  EXPECT_EQ(completion(R"(,"prompt":["hi"])")->prompt_text, "hi");
  EXPECT_EQ(completion(R"(,"prompt":[1,2])")->prompt_tokens, (std::vector<Token>{1, 2}));
  EXPECT_EQ(completion(R"(,"prompt":[[1,2]])")->prompt_tokens, (std::vector<Token>{1, 2}));
  EXPECT_EQ(completion(R"(,"prompt":"hi","logprobs":0)")->sampling.logprobs, 0);
  EXPECT_TRUE(completion(R"(,"prompt":"hi","echo":false,"suffix":"","best_of":1)").ok());
}

// The field each error must name.
TEST(OpenaiRequest, RefusesBadChatFields) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"n", "0"},
      {"n", "17"},
      {"n", "1000000000000000000"},
      {"n", "1.0"},
      {"n", "\"1\""},
      {"n", "true"},
      {"stream", "1"},
      {"stream", "\"true\""},
      {"stream_options", "[]"},
      {"stream_options", "true"},
      {"max_tokens", "0"},
      {"max_tokens", "-1"},
      {"max_tokens", "2147483648"},
      {"max_tokens", "18446744073709551615"},
      {"max_tokens", "{}"},
      {"max_completion_tokens", "0"},
      {"min_tokens", "-1"},
      {"temperature", "-0.1"},
      {"temperature", "2.1"},
      {"temperature", "\"hot\""},
      {"top_p", "0"},
      {"top_p", "1.01"},
      {"seed", "1.5"},
      {"seed", "9223372036854775808"},
      {"presence_penalty", "2.5"},
      {"frequency_penalty", "-2.5"},
      {"repetition_penalty", "0"},
      {"repetition_penalty", "-1"},
      {"logit_bias", "[]"},
      {"logit_bias", R"({"1000":1})"},
      {"logit_bias", R"({"-1":1})"},
      {"logit_bias", R"({"x":1})"},
      {"logit_bias", R"({"1":101})"},
      {"logit_bias", R"({"1":"5"})"},
      {"logprobs", "1"},
      {"top_logprobs", "21"},
      {"top_logprobs", "2"},
      {"stop", "5"},
      {"stop", "\"\""},
      {"stop", R"(["a",""])"},
      {"stop", R"(["a",1])"},
      {"stop",
       "[\"1\",\"2\",\"3\",\"4\",\"5\",\"6\",\"7\",\"8\",\"9\",\"a\",\"b\",\"c\",\"d\",\"e\",\"f\",\"g\",\"h\"]"},
      {"stop", "\"" + std::string(kMaxStopBytes + 1, 'x') + "\""},
      {"ignore_eos", "0"},
      {"return_token_ids", "\"no\""},
      {"return_expert_counts", "[]"},
      {"return_expert_gates", "1"},
      {"cache_prompt", "1"},
      {"tools", R"([{"type":"function"}])"},
      {"tools", "{}"},
      {"functions", R"([{}])"},
      {"tool_choice", "\"auto\""},
      {"function_call", "\"auto\""},
      {"response_format", R"({"type":"json_object"})"},
      {"response_format", "5"},
      {"guided_json", "{}"},
      {"kv_transfer_params", "{}"},
      {"kv_transfer_params", R"({"do_remote_decode":true})"},
      {"bootstrap_host", "\"10.0.0.1\""},
      {"bootstrap_room", "1"},
      {"data_parallel_rank", "0"},
  };
  for (const auto& [name, value] : cases) {
    const auto r = chat(fmt::format(",\"{}\":{}", name, value));
    ASSERT_FALSE(r.ok()) << name << ": " << value;
    EXPECT_EQ(r.error().code, ErrorCode::kInvalid);
    EXPECT_EQ(r.error().field, name) << value;
    EXPECT_NE(r.error().message.find(name), std::string::npos) << r.error().message;
    EXPECT_LT(r.error().message.size(), 300U);
  }
}

TEST(OpenaiRequest, RefusesBadMessages) {
  for (const char* messages :
       {"null", "[]", "{}", "\"hi\"", "[1]", "[[]]", "[{}]", R"([{"role":"user"}])", R"([{"content":"hi"}])",
        R"([{"role":"user","content":null}])", R"([{"role":"user","content":5}])",
        R"([{"role":"user","content":{"type":"text","text":"x"}}])", R"([{"role":"robot","content":"x"}])",
        R"([{"role":"tool","content":"x"}])", R"([{"role":5,"content":"x"}])",
        R"([{"role":"user","content":[{"type":"image_url","image_url":{"url":"http://x"}}]}])",
        R"([{"role":"user","content":["x"]}])", R"([{"role":"user","content":[{"type":"text"}]}])",
        R"([{"role":"user","content":"ok"},{"role":"assistant","content":"x","tool_calls":[{}]}])"}) {
    const auto r = parse_generation_request(Api::kChat, fmt::format(R"({{"messages":{}}})", messages), kLimits);
    ASSERT_FALSE(r.ok()) << messages;
    EXPECT_EQ(r.error().code, ErrorCode::kInvalid);
    EXPECT_TRUE(r.error().field.starts_with("messages")) << messages << " " << r.error().field;
  }
}

TEST(OpenaiRequest, RefusesBadPrompts) {
  for (const char* prompt : {"null", "\"\"", "[]", "[\"\"]", "[[]]", "[\"a\",\"b\"]", "[[1],[2]]", "5", "{}", "[-1]",
                             "[1000]", "[1,\"a\"]", "[1.5]", "[[1,null]]", "[{}]", "[[[1]]]"}) {
    const auto r = completion(fmt::format(",\"prompt\":{}", prompt));
    ASSERT_FALSE(r.ok()) << prompt;
    EXPECT_EQ(r.error().field, "prompt") << prompt;
  }
  EXPECT_NE(completion(R"(,"prompt":["a","b"])").error().message.find("several prompts"), std::string::npos);
  EXPECT_EQ(completion(R"(,"prompt":"a","echo":true)").error().field, "echo");
  EXPECT_EQ(completion(R"(,"prompt":"a","suffix":"b")").error().field, "suffix");
  EXPECT_EQ(completion(R"(,"prompt":"a","best_of":2)").error().field, "best_of");
  EXPECT_EQ(completion(R"(,"prompt":"a","logprobs":true)").error().field, "logprobs");
}

TEST(OpenaiRequest, RefusesWhatIsNotAnObject) {
  const std::string deep = std::string(5000, '[') + std::string(5000, ']');
  for (const std::string& body :
       {std::string(), std::string("{"), std::string("[]"), std::string("\"hi\""), std::string("null"),
        std::string("{\"n\":1}x"), std::string("{'n':1}"), std::string("{\"messages\":\"\xff\"}"), deep}) {
    const auto r = parse_generation_request(Api::kChat, body, kLimits);
    ASSERT_FALSE(r.ok()) << body.substr(0, 20);
    EXPECT_EQ(r.error().code, ErrorCode::kInvalid);
  }
}

TEST(OpenaiRequest, UnknownModelIsNotFound) {
  const auto r =
      parse_generation_request(Api::kChat, R"({"model":"gpt-x","messages":[{"role":"user","content":"hi"}]})", kLimits);
  ASSERT_FALSE(r.ok());
  EXPECT_EQ(r.error().code, ErrorCode::kNotFound);
  EXPECT_EQ(r.error().message, "model: \"gpt-x\" is not served here; served: tiny");
  const ApiError api = api_error(r.error());
  EXPECT_EQ(api.status, 404);
  EXPECT_EQ(api.code, "model_not_found");
  EXPECT_EQ(parse_generation_request(Api::kChat, R"({"model":5})", kLimits).error().field, "model");
}

TEST(OpenaiRequest, ErrorMessagesSayWhatIsAccepted) {
  EXPECT_EQ(chat(R"(,"temperature":3)").error().message, "temperature: got 3, accepted: a number from 0 to 2");
  EXPECT_EQ(chat(R"(,"n":[1])").error().message, "n: got a list, accepted: a whole number from 1 to 16");
  EXPECT_EQ(chat(R"(,"stream":"yes")").error().message, "stream: got \"yes\", accepted: true or false");
}

TEST(OpenaiRequest, MaxTokensFitTheContext) {
  GenerationRequest r;
  EXPECT_EQ(*resolve_max_tokens(r, 10, {100, 1000}), 90U);
  EXPECT_EQ(resolve_max_tokens(r, 100, {100, 1000}).error().code, ErrorCode::kTooLarge);
  EXPECT_EQ(resolve_max_tokens(r, 500, {100, 1000}).error().field, "messages");
  EXPECT_EQ(*resolve_max_tokens(r, 99, {100, 1000}), 1U);
  r.max_tokens = 90;
  EXPECT_EQ(*resolve_max_tokens(r, 10, {100, 1000}), 90U);
  EXPECT_EQ(resolve_max_tokens(r, 11, {100, 1000}).error().code, ErrorCode::kTooLarge);
  EXPECT_EQ(api_error(resolve_max_tokens(r, 11, {100, 1000}).error()).code, "context_length_exceeded");
  EXPECT_EQ(api_error(resolve_max_tokens(r, 11, {100, 1000}).error()).status, 400);
  r.sampling.min_tokens = 91;
  EXPECT_EQ(resolve_max_tokens(r, 10, {100, 1000}).error().field, "min_tokens");
  GenerationRequest c;
  c.api = Api::kCompletions;
  EXPECT_EQ(*resolve_max_tokens(c, 10, {100, 1000}), 16U);
  EXPECT_EQ(*resolve_max_tokens(c, 95, {100, 1000}), 5U);
  GenerationRequest many;
  many.n = 10;
  EXPECT_EQ(*resolve_max_tokens(many, 10, {100, 210}), 21U);
}

TEST(OpenaiRequest, ChoiceSeedsDiffer) {
  EXPECT_EQ(choice_seed(7, 0), 7U);
  EXPECT_NE(choice_seed(7, 1), choice_seed(7, 2));
  EXPECT_NE(choice_seed(7, 1), choice_seed(8, 1));
}

TEST(OpenaiRequest, ReadsTheSmallBodies) {
  EXPECT_EQ(parse_tokenize_request(R"({"prompt":"hi"})", kLimits)->prompt, "hi");
  EXPECT_EQ(parse_tokenize_request(R"({"messages":[{"role":"user","content":"x"}]})", kLimits)->messages.size(), 1U);
  EXPECT_FALSE(parse_tokenize_request("{}", kLimits).ok());
  EXPECT_FALSE(parse_tokenize_request(R"({"prompt":["a"]})", kLimits).ok());
  EXPECT_EQ(*parse_detokenize_request(R"({"tokens":[1,2]})", kLimits), (std::vector<Token>{1, 2}));
  EXPECT_TRUE(parse_detokenize_request(R"({"tokens":[]})", kLimits).ok());
  EXPECT_FALSE(parse_detokenize_request(R"({"tokens":[1000]})", kLimits).ok());
  EXPECT_FALSE(parse_detokenize_request("{}", kLimits).ok());
  EXPECT_EQ(*parse_release_request(R"({"lease":"x"})"), std::vector<std::string>{"x"});
  EXPECT_EQ(*parse_release_request(R"({"leases":["x","y"]})"), (std::vector<std::string>{"x", "y"}));
  for (const char* bad : {R"({"lease":1})", R"({"leases":[]})", R"({"leases":"x"})", R"({"leases":["x",1]})"}) {
    EXPECT_FALSE(parse_release_request(bad).ok()) << bad;
  }
}

TEST(OpenaiError, HasOpenAisShape) {
  EXPECT_EQ(render_error(api_error(invalid("n: \"x\"", "n"))),
            R"({"error":{"message":"n: \"x\"","type":"invalid_request_error","param":"n","code":"invalid_value"}})");
  EXPECT_EQ(render_error({500, "server_error", "", "", "m"}),
            R"({"error":{"message":"m","type":"server_error","param":null,"code":null}})");
  EXPECT_EQ(api_error(Error{ErrorCode::kExhausted, "full"}).status, 429);
}

}  // namespace
}  // namespace kindred::engine
