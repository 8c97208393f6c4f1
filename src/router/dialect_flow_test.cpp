// Prefill and decode on vLLM and SGLang servers, and plain llama-server, against backends that speak as these do.

#include <fmt/format.h>

#include "base/json.h"
#include "router/sglang_flow.h"
#include "router/testing.h"
#include "router/vllm_flow.h"

namespace kindred::router::testing {
namespace {

constexpr const char* kClientBody =
    R"({ "model":"m", "messages":[{"role":"user","content":"h\u00e9\"}"}],"stream":true,"max_tokens":7,)"
    R"("min_tokens":3,"n":1,"temperature":1.0e0,"stream_options":{"include_usage":true},"vendor":{"a":[1,2]} })";

Json tree(const std::string& text) { return Json::parse(text); }

class DialectFlow : public RouterTest {
 protected:
  void SetUp() override {
    options_.decode_policy = {.name = "least-loaded"};
    options_.prefill_policy.name = "least-loaded";
  }
  Answer ask(const std::string& body = kClientBody) { return call("POST", "/v1/chat/completions", body); }
};

// ------------------------------------------------------------------------------------------------ vLLM

class VllmPd : public DialectFlow {
 protected:
  FakeWorker& vllm(Role role, const std::string& version = "0.11.0") {
    FakeWorker& worker = add(role, "");
    worker.set_page("/v1/models", R"({"object":"list","data":[{"id":"m","object":"model","created":1,
        "owned_by":"vllm","root":"m","parent":null,"max_model_len":4096}]})");
    worker.set_page("/version", fmt::format(R"({{"version":"{}"}})", version));
    if (role == Role::kPrefill) worker.play(answer_prefill());
    return worker;
  }
  // What a vLLM server with the NIXL connector answers to the prefill leg.
  static Script answer_prefill(const std::string& more = {}) {
    return [more](const SeenLeg&, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
      const std::string body =
          R"({"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":)"
          R"({"role":"assistant","content":"thrown away"},"finish_reason":"length"}],"usage":{"prompt_tokens":11,)"
          R"("total_tokens":12,"completion_tokens":1},"kv_transfer_params":{"do_remote_prefill":true,)"
          R"("do_remote_decode":false,"remote_block_ids":[[1,2,3]],"remote_engine_id":"e-1",)"
          R"("remote_host":"10.0.0.1","remote_port":5600)" +
          more + "}}";
      co_await writer.send(200, json_type(), body);
    };
  }
};

TEST_F(VllmPd, PrefillMakesOneTokenAndDecodeGetsTheParametersAndTheClientsBytes) {
  FakeWorker& p = vllm(Role::kPrefill);
  FakeWorker& d = vllm(Role::kDecode);
  start();
  const Answer answer = ask();
  EXPECT_EQ(answer.status, 200);
  EXPECT_TRUE(answer.body.ends_with("data: [DONE]\n\n"));
  EXPECT_EQ(answer.body.find("thrown away"), std::string::npos);
  ASSERT_EQ(p.leg_count(), 1U);
  ASSERT_EQ(d.leg_count(), 1U);
  EXPECT_EQ(p.legs()[0].request_id, d.legs()[0].request_id);
  const std::string to_prefill = p.legs()[0].body;
  EXPECT_TRUE(to_prefill.starts_with(
      R"({ "model":"m", "messages":[{"role":"user","content":"h\u00e9\"}"}],"stream":false,"max_tokens":1,)"
      R"("temperature":1.0e0,"vendor":{"a":[1,2]})"))
      << to_prefill;
  const Json prefill = tree(to_prefill);
  for (const char* gone : {"min_tokens", "n", "stream_options", "best_of", "echo", "max_completion_tokens"}) {
    EXPECT_FALSE(prefill.contains(gone)) << gone;
  }
  EXPECT_EQ(prefill["kv_transfer_params"]["do_remote_decode"], true);
  EXPECT_EQ(prefill["kv_transfer_params"]["do_remote_prefill"], false);
  EXPECT_TRUE(prefill["kv_transfer_params"]["remote_engine_id"].is_null());
  const std::string body(kClientBody);
  EXPECT_EQ(
      d.legs()[0].body,
      body.substr(0, body.size() - 2) +
          R"(,"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,)"
          R"("remote_block_ids":[[1,2,3]],"remote_engine_id":"e-1","remote_host":"10.0.0.1","remote_port":5600} })");
  const Json last = tree(call("GET", "/status?decisions=1").body)["decisions"][0];
  EXPECT_EQ(last["prefill_worker"], p.url());
  EXPECT_EQ(last["prompt_tokens"], 11);
  EXPECT_TRUE(eventually([&] { return in_flight() == 0; }));
}

TEST_F(VllmPd, BothLimitsOfTokensBecomeOne) {
  const Json out = tree(*vllm_prefill_body(R"({"max_completion_tokens":50,"best_of":2,"echo":true})"));
  EXPECT_EQ(out["max_tokens"], 1);
  EXPECT_EQ(out["max_completion_tokens"], 1);
  EXPECT_FALSE(out.contains("best_of"));
  EXPECT_FALSE(out.contains("echo"));
}

TEST_F(VllmPd, CountsOfAPluginDecideAndStayHere) {
  options_.decode_policy = {.tau = 0};
  options_.cohorts = cohort_file({0, 1}, "");
  FakeWorker& p = vllm(Role::kPrefill);
  FakeWorker& d0 = vllm(Role::kDecode);
  FakeWorker& d1 = vllm(Role::kDecode);
  p.play(answer_prefill(R"(,"expert_counts":)" + counts_on(1)));
  start();
  for (int i = 0; i < 3; ++i) EXPECT_EQ(ask().status, 200);
  EXPECT_EQ(d0.leg_count(), 0U);
  ASSERT_EQ(d1.leg_count(), 3U);
  EXPECT_EQ(d1.legs()[0].body.find("expert_counts"), std::string::npos);
  EXPECT_NE(d1.legs()[0].body.find("remote_port"), std::string::npos);
}

TEST_F(VllmPd, DecodeIsRetriedWithTheSameParameters) {
  FakeWorker& p = vllm(Role::kPrefill);
  FakeWorker& d0 = vllm(Role::kDecode);
  FakeWorker& d1 = vllm(Role::kDecode);
  d0.play(refuse(500, "internal_error"));
  start();
  for (int i = 0; i < 2; ++i) EXPECT_EQ(ask().status, 200);
  EXPECT_EQ(p.leg_count(), 2U);
  EXPECT_GE(d0.leg_count(), 1U);
  EXPECT_EQ(d1.leg_count(), 2U);
}

TEST_F(VllmPd, APrefillWorkerWithoutAConnectorIsNamed) {
  FakeWorker& p = vllm(Role::kPrefill);
  FakeWorker& d = vllm(Role::kDecode);
  p.play([](const SeenLeg&, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
    co_await writer.send(200, json_type(), R"({"id":"x","choices":[],"kv_transfer_params":null})");
  });
  start();
  const Answer answer = ask();
  EXPECT_EQ(answer.status, 502);
  EXPECT_NE(answer.body.find("no KV connector"), std::string::npos);
  EXPECT_EQ(d.leg_count(), 0U);
}

TEST_F(VllmPd, WhatTheClientDidWrongPassesThrough) {
  FakeWorker& p = vllm(Role::kPrefill);
  FakeWorker& d = vllm(Role::kDecode);
  p.play(refuse(400, "context_length_exceeded"));
  start();
  const Answer answer = ask();
  EXPECT_EQ(answer.status, 400);
  EXPECT_NE(answer.body.find("context_length_exceeded"), std::string::npos);
  EXPECT_EQ(p.leg_count(), 1U);
  EXPECT_EQ(d.leg_count(), 0U);
}

TEST_F(VllmPd, AClientCannotPickARank) {
  FakeWorker& p = vllm(Role::kPrefill);
  FakeWorker& d = vllm(Role::kDecode);
  start();
  EXPECT_EQ(call("POST", "/v1/chat/completions", kClientBody, "x-data-parallel-rank: 7\r\nX-Other: 1\r\n").status, 200);
  for (const FakeWorker* worker : {&p, &d}) {
    EXPECT_EQ(worker->legs()[0].headers.count("X-data-parallel-rank"), 0U);
    EXPECT_EQ(worker->legs()[0].headers.count("X-Other"), 1U);
  }
}

TEST_F(VllmPd, OnlyMatchingVersionsPair) {
  FakeWorker& p_old = vllm(Role::kPrefill, "0.10.1");
  FakeWorker& p_new = vllm(Role::kPrefill, "0.11.0");
  FakeWorker& d_new = vllm(Role::kDecode, "0.11.2");
  start();
  for (int i = 0; i < 4; ++i) EXPECT_EQ(ask().status, 200);
  EXPECT_EQ(p_old.leg_count(), 0U);
  EXPECT_EQ(p_new.leg_count(), 4U);
  EXPECT_EQ(d_new.leg_count(), 4U);
}

// ---------------------------------------------------------------------------------------------- SGLang

class SglangPd : public DialectFlow {
 protected:
  FakeWorker& sglang(Role role) {
    FakeWorker& worker = add(role, "");
    worker.set_page("/v1/models", R"({"object":"list","data":[{"id":"m","object":"model","created":1,
        "owned_by":"sglang","root":"m","parent":null,"max_model_len":4096}]})");
    worker.set_page(
        "/get_server_info",
        fmt::format(R"({{"version":"0.5.4","disaggregation_mode":"{}","disaggregation_bootstrap_port":8998}})",
                    to_string(role)));
    return worker;
  }
};

TEST_F(SglangPd, BothLegsStartAtOnceInOneRoom) {
  FakeWorker& p = sglang(Role::kPrefill);
  FakeWorker& d = sglang(Role::kDecode);
  // Neither answers until the other has been asked, as the engines behave.
  p.play([&](const SeenLeg& leg, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
    for (int i = 0; i < 1000 && d.leg_count() == 0; ++i) co_await pause_for(5ms);
    co_await p.answer_plain(leg, writer);
  });
  d.play([&](const SeenLeg& leg, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
    for (int i = 0; i < 1000 && p.leg_count() == 0; ++i) co_await pause_for(5ms);
    co_await d.answer_plain(leg, writer);
  });
  start();
  for (int i = 0; i < 2; ++i) {
    const Answer answer = ask();
    EXPECT_TRUE(answer.complete);
    EXPECT_TRUE(answer.body.ends_with("data: [DONE]\n\n"));
  }
  ASSERT_EQ(p.leg_count(), 2U);
  ASSERT_EQ(d.leg_count(), 2U);
  const std::string body(kClientBody);
  const std::string sent = p.legs()[0].body;
  EXPECT_EQ(sent, d.legs()[0].body);
  EXPECT_TRUE(sent.starts_with(body.substr(0, body.size() - 2) +
                               R"(,"bootstrap_host":"127.0.0.1","bootstrap_port":8998,)"
                               R"("bootstrap_room":)"))
      << sent;
  const Json first = tree(sent), second = tree(p.legs()[1].body);
  EXPECT_TRUE(first["bootstrap_room"].is_number_unsigned());
  EXPECT_LE(first["bootstrap_room"].get<uint64_t>(), static_cast<uint64_t>(INT64_MAX));
  EXPECT_NE(first["bootstrap_room"], second["bootstrap_room"]);
  EXPECT_TRUE(eventually([&] { return in_flight() == 0; }));
}

TEST_F(SglangPd, AFailingPrefillCancelsTheDecodeLegAndAnotherPairIsTried) {
  FakeWorker& p0 = sglang(Role::kPrefill);
  FakeWorker& p1 = sglang(Role::kPrefill);
  FakeWorker& d0 = sglang(Role::kDecode);
  FakeWorker& d1 = sglang(Role::kDecode);
  p0.play(refuse(500, "internal_error"));
  for (FakeWorker* d : {&d0, &d1}) {
    // A decode worker says nothing until its KV has come, which never does from a prefill that failed.
    d->play([&, d](const SeenLeg& leg, net::Request& request, net::ResponseWriter& writer) -> net::Task<void> {
      const Json room = tree(leg.body)["bootstrap_room"];
      for (int i = 0; i < 1000 && !request.cancel.cancelled(); ++i) {
        for (const SeenLeg& seen : p1.legs()) {
          if (tree(seen.body)["bootstrap_room"] != room) continue;
          co_await d->answer_plain(leg, writer);
          co_return;
        }
        co_await pause_for(5ms);
      }
    });
  }
  start();
  for (int i = 0; i < 2; ++i) EXPECT_EQ(ask().status, 200);
  EXPECT_GE(p0.leg_count(), 1U);
  EXPECT_EQ(p1.leg_count(), 2U);
  EXPECT_TRUE(eventually([&] { return d0.cancelled() + d1.cancelled() == p0.leg_count(); }));
  EXPECT_TRUE(eventually([&] { return in_flight() == 0; }));
}

TEST_F(SglangPd, AFailingDecodeCancelsThePrefillLegWithinASecond) {
  FakeWorker& p = sglang(Role::kPrefill);
  FakeWorker& d = sglang(Role::kDecode);
  options_.retries = 0;
  p.play(hang);
  d.play(refuse(500, "internal_error"));
  start();
  const auto begun = std::chrono::steady_clock::now();
  const Answer answer = ask();
  EXPECT_EQ(answer.status, 500);
  EXPECT_LT(std::chrono::steady_clock::now() - begun, 3s);
  EXPECT_TRUE(eventually([&] { return p.cancelled() == 1; }));
  EXPECT_TRUE(eventually([&] { return in_flight() == 0; }));
}

TEST_F(SglangPd, AClientThatLeavesTakesBothLegsWithIt) {
  FakeWorker& p = sglang(Role::kPrefill);
  FakeWorker& d = sglang(Role::kDecode);
  p.play(hang);
  d.play(hang);
  start();
  auto client = open("POST", "/v1/chat/completions", kClientBody);
  ASSERT_TRUE(eventually([&] { return p.leg_count() == 1 && d.leg_count() == 1; }));
  client->close();
  EXPECT_TRUE(eventually([&] { return p.cancelled() == 1 && d.cancelled() == 1 && in_flight() == 0; }));
}

TEST_F(SglangPd, SeveralPromptsAreRefused) {
  sglang(Role::kPrefill);
  FakeWorker& d = sglang(Role::kDecode);
  start();
  const Answer answer = call("POST", "/v1/completions", R"({"model":"m","prompt":[ "a","b"]})");
  EXPECT_EQ(answer.status, 400);
  EXPECT_EQ(tree(answer.body)["error"]["param"], "prompt");
  EXPECT_EQ(call("POST", "/v1/completions", R"({"model":"m","prompt":[1,2,3]})").status, 200);  // token ids
  EXPECT_EQ(d.leg_count(), 1U);
}

// ------------------------------------------------------------------------------------------------ plain

TEST_F(DialectFlow, LlamaServerIsPlainAndKnown) {
  FakeWorker& w = add(Role::kBoth, "");
  w.set_page("/v1/models", R"({"data":[{"id":"m","object":"model","created":1,"owned_by":"llamacpp","meta":{}}]})");
  w.set_page("/props", R"({"default_generation_settings":{},"total_slots":2,"build_info":"b6500-0a1b2c3"})");
  w.set_page("/metrics", "llamacpp:requests_processing 2\nllamacpp:requests_deferred 1\n");
  options_.load_interval_ms = 20ms;
  start();
  EXPECT_EQ(ask().status, 200);
  EXPECT_EQ(w.legs()[0].body, kClientBody);
  ASSERT_TRUE(eventually([&] { return router_->core().fleet.status()[0].load.has_value(); }));
  const Json seen = tree(call("GET", "/status").body)["workers"][0];
  EXPECT_EQ(seen["dialect"], "llama-server");
  EXPECT_EQ(seen["load"]["waiting"], 1);
}

TEST_F(DialectFlow, AConfiguredDialectIsNotGuessed) {
  FakeWorker& w = add(Role::kBoth, "");
  w.set_page("/v1/models", R"({"data":[{"id":"m","object":"model","owned_by":"vllm"}]})");
  options_.dialects = {w.url() + "=openai"};
  start();
  EXPECT_EQ(tree(call("GET", "/status").body)["workers"][0]["dialect"], "openai");
}

TEST_F(DialectFlow, AnUnknownDialectIsRefusedWithTheAcceptedOnes) {
  FakeWorker& w = add(Role::kBoth, "");
  options_.dialects = {w.url() + "=tgi"};
  const std::string message = loop_.call([this] {
    const auto made = Router::make(loop_.executor(), options_, clock_);
    return made.ok() ? std::string() : made.error().message;
  });
  EXPECT_NE(message.find("kindred, vllm, sglang, llama-server, openai"), std::string::npos);
}

}  // namespace
}  // namespace kindred::router::testing
