// Anthropic's /v1/messages and OpenAI's /v1/responses on their way through, plain and with prefill and decode apart.

#include "router/api_form.h"

#include <fmt/format.h>

#include "base/json.h"
#include "router/errors.h"
#include "router/request_notes.h"
#include "router/testing.h"
#include "router/vllm_flow.h"

namespace kindred::router::testing {
namespace {

constexpr const char* kMessagesPath = "/v1/messages";
constexpr const char* kResponsesPath = "/v1/responses";

const std::string kMessage =
    R"({ "model":"m","max_tokens":64,"system":[{"type":"text","text":"be brief"}],"messages":[{"role":"user","content":)"
    R"([{"type":"text","text":"h\u00e9"}]}],"tools":[{"name":"t","input_schema":{"type":"object"}}],)"
    R"("thinking":{"type":"enabled","budget_tokens":32},"output_config":{"effort":"low"},"stream":true })";

const std::string kMessageStream =
    "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"id\":\"msg_1\",\"content\":[],\"usage\":"
    "{\"input_tokens\":25,\"output_tokens\":0}}}\n\n"
    "event: ping\ndata: {\"type\":\"ping\"}\n\n"
    "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"type\":"
    "\"thinking_delta\",\"thinking\":\"hm\"}}\n\n"
    "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":1,\"delta\":{\"type\":"
    "\"text_delta\",\"text\":\"data: [DONE]\"}}\n\n"
    "event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\"},\"usage\":"
    "{\"output_tokens\":15}}\n\n"
    "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n";

const std::string kResponse =
    R"({"model":"m","instructions":"be brief","input":[{"role":"user","content":"hi"}],"max_output_tokens":64,)"
    R"("reasoning":{"effort":"low"},"text":{"format":{"type":"json_schema","name":"x","schema":{}}},)"
    R"("tools":[{"type":"function","name":"t"}],"prompt":null,"stream":true})";

const std::string kResponseStream =
    "event: response.created\ndata: {\"type\":\"response.created\",\"sequence_number\":0,\"response\":{}}\n\n"
    "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"Hi\"}\n\n"
    "event: response.output_text.done\ndata: {\"type\":\"response.output_text.done\",\"text\":\"Hi\"}\n\n"
    "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"output\":[{\"text\":\"Hi\"}],"
    "\"usage\":{\"input_tokens\":7,\"output_tokens\":2,\"total_tokens\":9}}}\n\n";

Script stream(const std::string& text) {
  return [text](const SeenLeg&, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
    co_await writer.start(200, events_type());
    co_await writer.write(text);
    co_await writer.finish();
  };
}

Script answer(const std::string& text) {
  return [text](const SeenLeg&, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
    co_await writer.send(200, json_type(), text);
  };
}

Json error_of(const Answer& answer) {
  const Json root = parse_json(answer.body);
  return root.is_object() && root.contains("error") ? root["error"] : Json::object();
}

TEST(ApiForm, FollowsFromThePath) {
  EXPECT_EQ(api_form("/v1/messages"), ApiForm::kMessages);
  EXPECT_EQ(api_form("/v1/messages/count_tokens"), ApiForm::kMessages);
  EXPECT_EQ(api_form("/v1/messages2"), ApiForm::kOpenAi);
  EXPECT_EQ(api_form("/v1/responses"), ApiForm::kResponses);
  EXPECT_EQ(api_form("/v1/chat/completions"), ApiForm::kOpenAi);
}

TEST(ApiForm, ErrorsHaveItsShape) {
  const std::pair<int, const char*> cases[] = {{400, "invalid_request_error"},
                                               {401, "authentication_error"},
                                               {404, "not_found_error"},
                                               {429, "rate_limit_error"},
                                               {502, "api_error"},
                                               {503, "overloaded_error"},
                                               {504, "timeout_error"}};
  for (const auto& [status, type] : cases) {
    ApiError error = api_error(invalid("no", "f"));
    error.status = status;
    const Json root = Json::parse(error_json(error, ApiForm::kMessages));
    EXPECT_EQ(root["type"], "error");
    EXPECT_EQ(root["error"]["type"], type);
    EXPECT_EQ(root["error"]["code"], "invalid_value");
  }
  const std::string event = error_event(bad_worker_reply("gone"), ApiForm::kResponses, 7);
  ASSERT_TRUE(event.starts_with("event: error\ndata: ")) << event;
  const Json data = Json::parse(event.substr(event.find('{')));
  EXPECT_EQ(data["type"], "error");
  EXPECT_EQ(data["sequence_number"], 7);
  EXPECT_EQ(data["message"], "gone");
  EXPECT_EQ(data["error"]["code"], "bad_gateway");
}

TEST(ApiForm, UsageIsReadAtBothEndsOfAMessage) {
  RequestNotes notes;
  for (size_t at = 0; at < kMessageStream.size(); at += 7) notes.feed(std::string_view(kMessageStream).substr(at, 7));
  EXPECT_EQ(notes.best_usage().prompt_tokens, 25U);
  EXPECT_EQ(notes.best_usage().output_tokens, 15U);
  RequestNotes left;  // by a client that had enough
  left.feed(std::string_view(kMessageStream).substr(0, 200));
  left.events = 2;
  EXPECT_EQ(left.best_usage().prompt_tokens, 25U);
}

TEST(ApiForm, AForcedToolCallIsSeen) {
  EXPECT_TRUE(forces_tool_call(R"({"tool_choice": {"name":"t", "type" : "tool"}})"));
  EXPECT_TRUE(forces_tool_call(R"({"tool_choice":{"type":"any"}})"));
  EXPECT_FALSE(forces_tool_call(R"({"tool_choice":{"type":"auto"}})"));
  EXPECT_FALSE(forces_tool_call(R"({"tools":[{"tool_choice":{"type":"any"}}]})"));
  EXPECT_FALSE(forces_tool_call(R"({"tool_choice":null})"));
}

class ApiFlow : public RouterTest {
 protected:
  FakeWorker& vllm(Role role) {
    FakeWorker& worker = add(role, "");
    worker.set_page("/v1/models", R"({"data":[{"id":"m","owned_by":"vllm","max_model_len":4096}]})");
    worker.set_page("/version", R"({"version":"0.32.0"})");
    return worker;
  }
};

TEST_F(ApiFlow, PlainPassesBytesBothWays) {
  options_.prefill_policy.name = "kv-aware";
  FakeWorker& w = add(Role::kBoth, "");
  start();
  const std::string headers = "anthropic-version: 2023-06-01\r\nanthropic-beta: tools\r\nx-api-key: theirs\r\n";
  w.play(stream(kMessageStream));
  const Answer message = call("POST", kMessagesPath, kMessage, headers);
  EXPECT_TRUE(message.complete);
  EXPECT_EQ(message.body, kMessageStream);
  EXPECT_EQ(w.legs().back().body, kMessage);
  EXPECT_EQ(*w.legs().back().headers.find("anthropic-version"), "2023-06-01");
  EXPECT_EQ(*w.legs().back().headers.find("x-api-key"), "theirs");  // no keys of the router's own: they are for it
  w.play(stream(kResponseStream));
  const Answer response = call("POST", kResponsesPath, kResponse);
  EXPECT_EQ(response.body, kResponseStream);
  EXPECT_EQ(w.legs().back().body, kResponse);
  w.play(answer(R"({"input_tokens":2095})"));
  EXPECT_EQ(call("POST", "/v1/messages/count_tokens", kMessage).body, R"({"input_tokens":2095})");
  EXPECT_TRUE(eventually([&] { return in_flight() == 0; }));
  EXPECT_TRUE(has_metric("kindred_router_stream_events_total 10"));
}

TEST_F(ApiFlow, AWorkerWithoutTheEndpointSaysSoItself) {
  FakeWorker& w = add(Role::kBoth, "");
  w.play(refuse(404, "not_found"));
  start();
  for (const char* path : {kMessagesPath, kResponsesPath}) {
    const Answer answer = call("POST", path, kMessage);
    EXPECT_EQ(answer.status, 404);
    EXPECT_EQ(error_of(answer)["message"], "scripted");
  }
  EXPECT_EQ(w.leg_count(), 2U);
}

TEST_F(ApiFlow, ErrorsOfTheRouterHaveTheApisForm) {
  options_.edge.api_keys = "alice:alices-own-key rpm=3";
  FakeWorker& w = add(Role::kBoth, "");
  w.play(stream(kMessageStream));
  start();
  const Answer nobody = call("POST", kMessagesPath, kMessage, "x-api-key: nobodys-key\r\n");
  EXPECT_EQ(nobody.status, 401);
  EXPECT_EQ(parse_json(nobody.body)["type"], "error");
  EXPECT_EQ(error_of(nobody)["type"], "authentication_error");
  const std::string key = "x-api-key: alices-own-key\r\nanthropic-version: 2023-06-01\r\n";
  EXPECT_EQ(call("POST", kMessagesPath, kMessage, key).status, 200);
  EXPECT_EQ(w.legs().back().headers.find("x-api-key"), nullptr);  // it was the router's
  const Answer unknown = call("POST", kMessagesPath, R"({"model":"other","messages":[]})", key);
  EXPECT_EQ(unknown.status, 404);
  EXPECT_EQ(error_of(unknown)["type"], "not_found_error");
  EXPECT_EQ(error_of(unknown)["code"], "model_not_found");
  EXPECT_EQ(error_of(call("POST", kMessagesPath, "{", key))["type"], "invalid_request_error");
  const Answer limited = call("POST", kMessagesPath, kMessage, key);
  EXPECT_EQ(limited.status, 429);
  EXPECT_EQ(error_of(limited)["type"], "rate_limit_error");
  const Answer kept = call("GET", "/v1/responses/resp_1", "", "Authorization: Bearer alices-own-key\r\n");
  EXPECT_EQ(kept.status, 404);
  EXPECT_NE(kept.body.find("kept by the worker"), std::string::npos) << kept.body;
}

TEST_F(ApiFlow, AMessageIsSplitOnVllm) {
  FakeWorker& p = vllm(Role::kPrefill);
  FakeWorker& d = vllm(Role::kDecode);
  p.play(answer(R"({"id":"msg_0","type":"message","content":[{"type":"text","text":"thrown away"}],"usage":)"
                R"({"input_tokens":25,"output_tokens":1},"kv_transfer_params":{"do_remote_prefill":true,"e":"1"}})"));
  d.play(stream(kMessageStream));
  start();
  const Answer got = call("POST", kMessagesPath, kMessage);
  EXPECT_EQ(got.body, kMessageStream);
  ASSERT_EQ(p.leg_count(), 1U);
  const Json prefill = Json::parse(p.legs()[0].body);
  EXPECT_EQ(prefill["stream"], false);
  EXPECT_EQ(prefill["max_tokens"], 1);
  EXPECT_EQ(prefill["kv_transfer_params"]["do_remote_decode"], true);
  EXPECT_EQ(prefill["thinking"]["budget_tokens"], 32);
  ASSERT_EQ(d.leg_count(), 1U);
  EXPECT_EQ(d.legs()[0].body,
            kMessage.substr(0, kMessage.size() - 2) + R"(,"kv_transfer_params":{"do_remote_prefill":true,"e":"1"} })");
  const Json last = Json::parse(call("GET", "/status?decisions=1").body)["decisions"][0];
  EXPECT_EQ(last["prefill_worker"], p.url());
  EXPECT_EQ(last["prompt_tokens"], 25);
}

TEST_F(ApiFlow, WhatVllmCannotSplitADecodeWorkerDoesWhole) {
  FakeWorker& p = vllm(Role::kPrefill);
  FakeWorker& d = vllm(Role::kDecode);
  d.play(stream(kResponseStream));
  start();
  EXPECT_EQ(call("POST", kResponsesPath, kResponse).body, kResponseStream);
  EXPECT_EQ(d.legs().back().body, kResponse);
  d.play(answer(R"({"type":"message"})"));
  const std::string forced = R"({"model":"m","messages":[],"tool_choice":{"type":"any"}})";
  EXPECT_EQ(call("POST", kMessagesPath, forced).status, 200);
  EXPECT_EQ(d.legs().back().body, forced);
  EXPECT_EQ(p.leg_count(), 0U);
  p.play(answer(R"({"input_tokens":3})"));
  EXPECT_EQ(call("POST", "/v1/messages/count_tokens", kMessage).body, R"({"input_tokens":3})");
  EXPECT_EQ(p.leg_count(), 1U);
  const Json last = Json::parse(call("GET", "/status?decisions=9").body)["decisions"];
  EXPECT_TRUE(last.back()["prefill_worker"].is_null()) << last.dump();
  EXPECT_TRUE(eventually([&] { return in_flight() == 0; }));
}

TEST_F(ApiFlow, OfADecodeWorkerThatIsNoEngineNothingIsAsked) {
  FakeWorker& p = add(Role::kPrefill);
  FakeWorker& d = add(Role::kDecode);
  start();
  for (const char* path : {kMessagesPath, kResponsesPath}) {
    const Answer answer = call("POST", path, path == kMessagesPath ? kMessage : kResponse);
    EXPECT_EQ(answer.status, 404) << path;
    EXPECT_EQ(error_of(answer)["code"], "endpoint_not_served") << answer.body;
  }
  EXPECT_EQ(p.leg_count() + d.leg_count(), 0U);
}

TEST_F(ApiFlow, WorkersThatDoItAllServeBesidePairs) {
  add(Role::kPrefill);
  add(Role::kDecode);
  FakeWorker& w = add(Role::kBoth, "");
  w.play(stream(kMessageStream));
  start();
  EXPECT_EQ(call("POST", kMessagesPath, kMessage).body, kMessageStream);
  EXPECT_EQ(w.leg_count(), 1U);
}

}  // namespace
}  // namespace kindred::router::testing
