#include <gtest/gtest.h>

#include <string>

#include "base/json.h"
#include "net/http_server.h"
#include "router/errors.h"
#include "router/headers.h"
#include "router/prefill_reply.h"
#include "router/request_scan.h"

namespace kindred::router {
namespace {

Result<RequestScan> scan(std::string_view text) { return scan_request(text, text.size()); }

TEST(RequestScan, FindsWhatRoutingNeeds) {
  const std::string body =
      R"({ "z":{"model":"no"}, "model" : "m\u00e9", "messages": [ {"role":"user","content":"a]b"} ] , "n":3,)"
      R"("max_tokens":7,"max_completion_tokens":9,"stream":true,"seed":12345678901234567890123})";
  const auto got = scan(body);
  ASSERT_TRUE(got.ok()) << got.error().message;
  EXPECT_EQ(got->model, "mé");
  EXPECT_TRUE(got->stream);
  EXPECT_EQ(got->n, 3U);
  EXPECT_EQ(got->max_tokens, 9U);
  EXPECT_EQ(got->prompt, R"([ {"role":"user","content":"a]b"} ])");
  EXPECT_GE(got->prompt.data(), body.data());  // in the caller's bytes, though they were copied to be parsed
  EXPECT_LT(got->prompt.data(), body.data() + body.size());
}

TEST(RequestScan, ReadsInPlaceWherePaddingIsGiven) {
  std::string body = R"({"model":"m","prompt":"x" })";
  const std::string before = body;
  body.reserve(body.size() + net::kBodyPadding);
  const auto got = scan_request(body, body.capacity());
  ASSERT_TRUE(got.ok()) << got.error().message;
  EXPECT_EQ(got->prompt, "\"x\"");
  EXPECT_EQ(body, before);
}

TEST(RequestScan, TakesNullAndAbsenceForTheDefault) {
  const auto got = scan(R"({"model":"m","prompt":[1,2,3],"stream":null,"n":null,"max_tokens":null})");
  ASSERT_TRUE(got.ok()) << got.error().message;
  EXPECT_FALSE(got->stream);
  EXPECT_EQ(got->n, 1U);
  EXPECT_FALSE(got->max_tokens.has_value());
  EXPECT_EQ(got->prompt, "[1,2,3]");
  EXPECT_TRUE(scan("{}").ok());
}

TEST(RequestScan, FindsThePromptOfOtherApis) {
  const std::string body =
      R"({"system":[{"type":"text","text":"s"}],"messages":[{"role":"user"}],"max_tokens":5,"model":"m"})";
  const auto messages = scan(body);
  ASSERT_TRUE(messages.ok()) << messages.error().message;
  EXPECT_EQ(messages->prompt, R"([{"role":"user"}])");
  EXPECT_EQ(messages->preamble, R"([{"type":"text","text":"s"}])");
  EXPECT_GE(messages->preamble.data(), body.data());
  EXPECT_LT(messages->preamble.data(), body.data() + body.size());
  EXPECT_EQ(messages->prompt_bytes(), messages->prompt.size() + messages->preamble.size());
  const auto responses = scan(R"({"input":"hi","instructions":"s","max_output_tokens":9,"prompt":{"id":"pmpt_1"}})");
  ASSERT_TRUE(responses.ok()) << responses.error().message;
  EXPECT_EQ(responses->prompt, "\"hi\"");
  EXPECT_EQ(responses->preamble, "\"s\"");
  EXPECT_EQ(responses->max_tokens, 9U);
  const auto odd = scan(R"({"input":{"a":1},"instructions":null,"system":3,"max_output_tokens":null})");
  ASSERT_TRUE(odd.ok()) << odd.error().message;
  EXPECT_EQ(odd->prompt_bytes(), 0U);
}

TEST(RequestScan, NamesTheFieldAtFault) {
  const std::pair<const char*, const char*> cases[] = {
      {R"({"model":1})", "model"},
      {R"({"model":null})", "model"},
      {R"({"model":["m"]})", "model"},
      {R"({"stream":"true"})", "stream"},
      {R"({"stream":1})", "stream"},
      {R"({"n":"1"})", "n"},
      {R"({"n":1.5})", "n"},
      {R"({"n":-1})", "n"},
      {R"({"n":99999999999999999999})", "n"},
      {R"({"max_tokens":{}})", "max_tokens"},
      {R"({"max_completion_tokens":[]})", "max_completion_tokens"},
      {R"({"messages":"hi"})", "messages"},
      {R"({"messages":null})", "messages"},
      {R"({"prompt":1})", "prompt"},
      {R"({"model":"a","model":"b"})", "model"},
      {R"({"n":1,"n":2})", "n"},
      {R"({"input":"a","input":"b"})", "input"},
      {R"({"max_output_tokens":"1"})", "max_output_tokens"},
      {R"({"mod\u0065l":"a","model":"b"})", "model"},
  };
  for (const auto& [text, field] : cases) {
    const auto got = scan(text);
    ASSERT_FALSE(got.ok()) << text;
    EXPECT_EQ(got.error().code, ErrorCode::kInvalid) << text;
    EXPECT_EQ(got.error().field, field) << text;
  }
}

TEST(RequestScan, RefusesFieldsThatSteerTheTransferOfKv) {
  for (const char* text : {
           R"({"model":"m","kv_transfer_params":{"do_remote_prefill":true}})",
           R"({"kv_transfer_params":null,"model":"m"})",
           R"({"model":"m","kv\u005ftransfer_params":1})",
           R"({"model":"m","\u006bv_transfer_params":1})",
           R"({"bootstrap_host":"evil","model":"m"})",
           R"({"bootstrap_room":[1,2]})",
           R"({"a":{"b":[1,{"c":2}]},"bootstrap_port":1})",
           R"({"ec_transfer_params":{}})",
           R"({"disaggregated_params":{}})",
           R"({"disagg_prefill_dp_rank":1})",
           R"({"routed_dp_rank":1})",
           R"({"data_parallel_rank":1})",
       }) {
    const auto got = scan(text);
    ASSERT_FALSE(got.ok()) << text;
    EXPECT_EQ(got.error().code, ErrorCode::kInvalid) << text;
    EXPECT_TRUE(is_forbidden_field(got.error().field)) << text;
  }
  // vLLM puts these beside `kv_transfer_params`.
  for (const char* text :
       {R"({"vllm_xargs":{"a":[1],"kv_transfer_params":"x"}})", R"({"vllm_xargs":{"kv_transfer\u005fparams":null}})"}) {
    const auto got = scan(text);
    ASSERT_FALSE(got.ok()) << text;
    EXPECT_EQ(got.error().field, "vllm_xargs.kv_transfer_params") << text;
  }
  EXPECT_TRUE(scan(R"({"vllm_xargs":{"a":[1,"b"],"c":2.5},"model":"m"})").ok());
  EXPECT_FALSE(scan(R"({"vllm_xargs":{"a":[1}})").ok());
  // Only there, and only as names: the rest is the client's own data.
  EXPECT_TRUE(scan(R"({"metadata":{"kv_transfer_params":1},"prompt":"kv_transfer_params"})").ok());
}

TEST(RequestScan, RefusesWhatIsNotJson) {
  for (const std::string text : {"",
                                 " ",
                                 "{",
                                 "}",
                                 "[]",
                                 "\"x\"",
                                 "null",
                                 "nul",
                                 "1",
                                 "{]",
                                 "{,}",
                                 R"({"a":1,})",
                                 R"({"a":"b":1})",
                                 R"({"a":"{b":[{}]}})",
                                 R"({"a":["b":1]})",
                                 R"({"a":1"b"})",
                                 R"({"a":[1$"}{"]})",
                                 R"({"a":1x})",
                                 R"({"a" 1})",
                                 R"({"a":})",
                                 R"({"a":1}})",
                                 R"({"a":1} x)",
                                 R"({"a":1}{"a":2})",
                                 R"({"a":[1,,2]})",
                                 R"({"a":[1,2)",
                                 R"({"a":[}],"b":1})",
                                 R"({"a":tru})",
                                 R"({"a":[nul]})",
                                 R"({"a":"x)",
                                 R"({a:1})",
                                 R"({'a':1})",
                                 "{\"a\":\"\xff\"}",
                                 "\xef\xbb\xbf[]"}) {
    const auto got = scan(text);
    ASSERT_FALSE(got.ok()) << text;
    EXPECT_EQ(got.error().code, ErrorCode::kInvalid) << text;
  }
}

TEST(RequestScan, BoundsDepth) {
  const auto nested = [](size_t depth) { return R"({"a":)" + std::string(depth, '[') + std::string(depth, ']') + "}"; };
  EXPECT_TRUE(scan(nested(100)).ok());
  EXPECT_FALSE(scan(nested(129)).ok());
  EXPECT_FALSE(scan(nested(1'000'000)).ok());
  const std::string in_messages = R"({"messages":)" + std::string(5000, '[') + std::string(5000, ']') + "}";
  EXPECT_FALSE(scan(in_messages).ok());
}

TEST(RequestScan, ReadsBigBodies) {
  std::string body =
      R"({"model":"m","messages":[{"role":"user","content":")" + std::string(8'000'000, 'x') + R"("}],"tail":[)";
  for (int i = 0; i < 200'000; ++i) body += "12345,";
  body += R"(1],"stream":true})";
  const auto got = scan(body);
  ASSERT_TRUE(got.ok()) << got.error().message;
  EXPECT_TRUE(got->stream);
  EXPECT_GT(got->prompt.size(), 8'000'000U);
}

constexpr const char* kReply =
    R"({"v":1,"state":{"a":[1,{"b":"}"}]},"finished":false,"content_type":"text/event-stream",)"
    R"("first":"data: {\"x\":\"é\\n\"}\n\n","usage":{"prompt_tokens":12,"cached_tokens":3,"completion_tokens":1},)"
    R"("n":2,"max_tokens":5,"fingerprint":"f\"0","expert_counts":{"v":1},"lease":{"id":"l1","bytes":7},"new":[{}]})";

TEST(RequestScan, AScannerKeepsNothingOfTheBodyBefore) {
  RequestScanner scanner;
  // Beyond what it keeps memory for, then small, wrong, and right again.
  const std::string big = R"({"model":"big","stream":true,"n":2,"prompt":")" + std::string(2'000'000, 'x') + "\"}";
  for (int round = 0; round < 2; ++round) {
    const auto first = scanner.scan(big, big.size());
    ASSERT_TRUE(first.ok()) << first.error().message;
    EXPECT_EQ(first->model, "big");
    EXPECT_EQ(first->prompt.size(), 2'000'002U);
    EXPECT_FALSE(scanner.scan(R"({"model":)", 9).ok());
    const std::string small = R"({"prompt":"p"})";
    const auto second = scanner.scan(small, small.size());
    ASSERT_TRUE(second.ok()) << second.error().message;
    EXPECT_EQ(second->model, std::nullopt);
    EXPECT_FALSE(second->stream);
    EXPECT_EQ(second->n, 1U);
    EXPECT_EQ(second->prompt, "\"p\"");
  }
}

TEST(PrefillReply, KeepsRawSpans) {
  auto parsed = PrefillReply::parse(kReply);
  ASSERT_TRUE(parsed.ok()) << parsed.error().message;
  const PrefillReply reply = *std::move(parsed);
  EXPECT_FALSE(reply.finished);
  EXPECT_EQ(reply.first, "data: {\"x\":\"é\\n\"}\n\n");
  EXPECT_EQ(reply.prompt_tokens, 12U);
  EXPECT_EQ(reply.n, 2U);
  EXPECT_EQ(reply.lease_id, "l1");
  EXPECT_EQ(reply.lease, R"({"id":"l1","bytes":7})");
  EXPECT_EQ(reply.state, R"({"a":[1,{"b":"}"}]})");
  EXPECT_EQ(reply.expert_counts, R"({"v":1})");
  EXPECT_EQ(reply.handoff("http://p:1"),
            R"({"v":1,"from":"http://p:1","fingerprint":"f\"0","lease":{"id":"l1","bytes":7},)"
            R"("state":{"a":[1,{"b":"}"}]}})");
}

TEST(PrefillReply, NeedsNoLeaseWhenFinished) {
  const auto reply = PrefillReply::parse(
      R"({"v":1,"finished":true,"content_type":"application/json","first":"{}","usage":{"prompt_tokens":1},)"
      R"("n":1,"fingerprint":"f","lease":null,"state":null,"expert_counts":null})");
  ASSERT_TRUE(reply.ok()) << reply.error().message;
  EXPECT_TRUE(reply->expert_counts.empty());
}

TEST(PrefillReply, RefusesWhatIsNot) {
  const auto with = [](const char* name, Json value) {
    auto reply = Json::parse(kReply);
    if (value.is_discarded()) reply.erase(name);
    else reply[name] = std::move(value);
    return PrefillReply::parse(reply.dump());
  };
  const Json absent(Json::value_t::discarded);
  EXPECT_TRUE(with("new", 1).ok());
  for (const auto& [name, value] : std::vector<std::pair<const char*, Json>>{
           {"v", 2},
           {"v", absent},
           {"finished", "no"},
           {"content_type", "text/html"},
           {"content_type", "application/json\r\nX-Evil: 1"},
           {"content_type", absent},
           {"first", 1},
           {"usage", {}},
           {"n", 0},
           {"n", -1},
           {"n", 1000000},
           {"fingerprint", 1},
           {"lease", absent},
           {"lease", "l"},
           {"lease", {{"bytes", 1}}},
           {"state", absent},
           {"state", "s"},
           {"expert_counts", "c"},
       }) {
    EXPECT_FALSE(with(name, value).ok()) << name << " " << value;
  }
  for (const char* text : {"", "{", "[]", "null", "{\"v\":1}"}) EXPECT_FALSE(PrefillReply::parse(text).ok()) << text;
}

TEST(Errors, HaveOpenAisForm) {
  const auto root = Json::parse(error_json(api_error(invalid("no \"x\"", "n"))));
  EXPECT_EQ(root["error"]["message"], "no \"x\"");
  EXPECT_EQ(root["error"]["type"], "invalid_request_error");
  EXPECT_EQ(root["error"]["param"], "n");
  EXPECT_EQ(root["error"]["code"], "invalid_value");
  const std::string event = error_event(bad_worker_reply("gone"));
  EXPECT_TRUE(event.starts_with("data: {\"error\":{"));
  EXPECT_TRUE(event.ends_with("}}\n\n"));
  EXPECT_TRUE(Json::parse(event.substr(6))["error"]["param"].is_null());
  const std::pair<ErrorCode, int> cases[] = {
      {ErrorCode::kInvalid, 400},   {ErrorCode::kNotFound, 404},    {ErrorCode::kTooLarge, 413},
      {ErrorCode::kExhausted, 429}, {ErrorCode::kUnavailable, 503}, {ErrorCode::kTimeout, 504},
      {ErrorCode::kCorrupt, 502},   {ErrorCode::kIo, 502},          {ErrorCode::kInternal, 500},
  };
  for (const auto& [code, status] : cases) EXPECT_EQ(api_error({code, "x"}).status, status);
}

TEST(Errors, ReadWhatAWorkerSaid) {
  EXPECT_EQ(parse_upstream_error(R"({"error":{"code":"queue_full","message":"later"}})").code, "queue_full");
  EXPECT_EQ(parse_upstream_error(R"({"object":"error","message":"top","code":400})").message, "top");
  EXPECT_EQ(parse_upstream_error(R"({"error":"flat","message":"m"})").message, "m");
  EXPECT_EQ(parse_upstream_error("<html>").message, "");
}

TEST(Headers, CrossTheRouterWithoutWhatIsOfOneConnection) {
  net::Headers headers;
  headers.add("Host", "router");
  headers.add("Content-Length", "5");
  headers.add("Connection", "close, X-Hop");
  headers.add("X-Hop", "1");
  headers.add("Keep-Alive", "1");
  headers.add("x-kindred-leg", "decode");
  headers.add("X-Kindred-Handoff-Bytes", "9");
  headers.add("x-request-id", "mine");
  headers.add("X-REQUEST-ID", "again");
  headers.add("Authorization", "Bearer k");
  headers.add("traceparent", "00-1");
  const net::Headers got = to_worker(headers, "id-1");
  EXPECT_EQ(got.size(), 3U);
  EXPECT_EQ(*got.find("Authorization"), "Bearer k");
  EXPECT_EQ(*got.find("traceparent"), "00-1");
  EXPECT_EQ(*got.find("X-Request-Id"), "id-1");
}

TEST(Headers, KeepSaneRequestIdsOnly) {
  EXPECT_TRUE(is_sane_request_id("abc-123_~!"));
  EXPECT_TRUE(is_sane_request_id(std::string(128, 'x')));
  EXPECT_FALSE(is_sane_request_id(std::string(129, 'x')));
  EXPECT_FALSE(is_sane_request_id(""));
  EXPECT_FALSE(is_sane_request_id("a b"));
  EXPECT_FALSE(is_sane_request_id("a\tb"));
  EXPECT_FALSE(is_sane_request_id("é"));
}

}  // namespace
}  // namespace kindred::router
