// The PD flow against scripted workers: when all goes well, and where requests go.

#include "base/json.h"
#include "router/testing.h"

namespace kindred::router::testing {
namespace {

using json = Json;

TEST_F(PdFlowTest, StreamsBothLegsAsOne) {
  FakeWorker& p = prefill();
  FakeWorker& d = decode();
  start();
  const std::string body = chat_body(true, R"(,"vendor_field":{"x":1.50},"messages2":"\u00e9")");
  const Answer answer = call("POST", "/v1/chat/completions", body,
                             "X-Request-Id: mine-1\r\nAuthorization: Bearer k\r\nX-Kindred-Leg: decode\r\n");
  EXPECT_EQ(answer.status, 200);
  EXPECT_TRUE(answer.complete);
  EXPECT_EQ(answer.body, kWholeStream);
  EXPECT_EQ(*answer.headers.find("Content-Type"), "text/event-stream");
  EXPECT_EQ(*answer.headers.find("X-Request-Id"), "mine-1");

  ASSERT_EQ(p.leg_count(), 1U);
  ASSERT_EQ(d.leg_count(), 1U);
  const SeenLeg first = p.legs()[0], second = d.legs()[0];
  EXPECT_EQ(first.leg, "prefill");
  EXPECT_EQ(second.leg, "decode");
  EXPECT_EQ(first.body, body);  // byte for byte
  EXPECT_EQ(second.body, body);
  EXPECT_EQ(first.request_id, "mine-1");
  EXPECT_EQ(second.request_id, "mine-1");
  EXPECT_EQ(second.headers.count("Authorization"), 1U);
  EXPECT_EQ(second.headers.count("X-Kindred-Leg"), 1U);
  const json handoff = json::parse(second.handoff);
  EXPECT_EQ(handoff["v"], 1);
  EXPECT_EQ(handoff["from"], p.url());
  EXPECT_EQ(handoff["fingerprint"], "f0");
  EXPECT_EQ(handoff["lease"]["id"], "lease-1");
  EXPECT_EQ(handoff["state"]["opaque"], "se\"cret");
  EXPECT_TRUE(eventually([&] { return p.released() == std::vector<std::string>{"lease-1"}; }));
  EXPECT_TRUE(eventually([&] { return in_flight() == 0; }));
  EXPECT_TRUE(eventually([&] { return has_metric("kindred_router_leases_released_total 1"); }));
  EXPECT_TRUE(has_metric("kindred_router_requests_total{outcome=\"ok\",status=\"200\"} 1"));
  EXPECT_TRUE(has_metric("kindred_router_ttft_seconds_count 1"));
  EXPECT_TRUE(has_metric("kindred_router_tpot_seconds_count 1"));
}

TEST_F(PdFlowTest, TheFirstEventDoesNotWaitForDecode) {
  prefill();
  FakeWorker& d = decode();
  Gate gate;
  d.play([&](const SeenLeg& leg, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
    co_await gate.wait();
    co_await d.answer_decode(leg, writer);
  });
  start();
  auto connection = open("POST", "/v1/chat/completions", chat_body(true));
  const std::string begin = connection->read_until("\"one\"}}]}\n\n");
  EXPECT_NE(begin.find("\"one\""), std::string::npos);
  EXPECT_EQ(begin.find("\"two\""), std::string::npos);
  gate.open();
  EXPECT_EQ(parse_answer(begin + connection->read_to_end()).body, kWholeStream);
}

TEST_F(PdFlowTest, AnswersWhole) {
  FakeWorker& p = prefill();
  decode();
  start();
  const Answer answer = chat(false);
  EXPECT_EQ(answer.status, 200);
  EXPECT_TRUE(answer.complete);
  EXPECT_EQ(answer.body, R"({"text":"one two three"})");
  EXPECT_EQ(*answer.headers.find("Content-Type"), "application/json");
  EXPECT_TRUE(eventually([&] { return p.released().size() == 1; }));
}

TEST_F(PdFlowTest, StreamsToHttp10) {
  prefill();
  decode();
  start();
  auto connection = net::testing::raw_connect(port_);
  const std::string body = chat_body(true);
  connection.send("POST /v1/chat/completions HTTP/1.0\r\nContent-Length: " + std::to_string(body.size()) + "\r\n\r\n" +
                  body);
  EXPECT_EQ(parse_answer(connection.read_to_end()).body, kWholeStream);
}

TEST_F(PdFlowTest, EndsAtPrefillWhenFinishedThere) {
  FakeWorker& p = prefill();
  FakeWorker& d = decode();
  p.set_finished(true);
  start();
  const Answer stream = chat(true);
  EXPECT_TRUE(stream.complete);
  EXPECT_NE(stream.body.find("[DONE]"), std::string::npos);
  EXPECT_EQ(chat(false).body, R"({"text":"one"})");
  EXPECT_EQ(d.leg_count(), 0U);
  EXPECT_TRUE(p.released().empty());
  EXPECT_TRUE(eventually([&] { return in_flight() == 0; }));
}

TEST_F(PdFlowTest, ExpertCountsNeverReachTheClient) {
  prefill();
  decode();
  start();
  for (const bool stream : {true, false}) {
    const Answer answer = chat(stream);
    EXPECT_EQ(answer.body.find("expert_counts"), std::string::npos);
    EXPECT_EQ(answer.body.find("se\"cret"), std::string::npos);
  }
}

TEST_F(PdFlowTest, EventsSplitAcrossPacketsPassAtOnce) {
  prefill();
  FakeWorker& d = decode();
  Gate gate;
  d.play([&](const SeenLeg&, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
    co_await writer.start(200, events_type());
    co_await writer.write("data: {\"te");
    co_await gate.wait();
    co_await writer.write("xt\":2}\n");
    co_await pause_for(10ms);
    co_await writer.write("\ndata: [DONE]\n\n");
    co_await writer.finish();
  });
  start();
  auto connection = open("POST", "/v1/chat/completions", chat_body(true));
  const std::string begin = connection->read_until("data: {\"te");
  EXPECT_NE(begin.find("data: {\"te"), std::string::npos);
  gate.open();
  const Answer answer = parse_answer(begin + connection->read_to_end());
  EXPECT_TRUE(answer.complete);
  EXPECT_NE(answer.body.find("data: {\"text\":2}\n\ndata: [DONE]\n\n"), std::string::npos);
}

TEST_F(PdFlowTest, OnlyEqualFingerprintsPair) {
  options_.prefill_policy.name = "round-robin";
  FakeWorker& p_old = prefill("old");
  FakeWorker& p_new = prefill("new");
  FakeWorker& d_new = decode("new");
  start();
  for (int i = 0; i < 4; ++i) EXPECT_EQ(chat(false).status, 200);
  EXPECT_EQ(p_old.leg_count(), 0U);
  EXPECT_EQ(p_new.leg_count(), 4U);
  p_new.kill();
  ASSERT_TRUE(eventually([&] { return !ready(); }));
  const Answer answer = chat(true);
  EXPECT_EQ(answer.status, 503);
  EXPECT_NE(answer.body.find("same model fingerprint"), std::string::npos);
  EXPECT_EQ(d_new.leg_count(), 4U);
  EXPECT_NE(call("GET", "/ready").body.find("fingerprint"), std::string::npos);
}

TEST_F(PdFlowTest, LocalityFindsTheCohortsWorker) {
  FakeWorker& p = prefill();
  FakeWorker& d0 = decode();
  FakeWorker& d1 = decode();
  options_.cohorts = cohort_file({0, 1});
  options_.decode_policy.tau = 0;
  start();
  for (int i = 0; i < 3; ++i) EXPECT_EQ(chat(true).body, kWholeStream);
  EXPECT_EQ(d0.leg_count(), 3U);
  EXPECT_EQ(d1.leg_count(), 0U);
  p.set_counts(counts_on(1));
  for (int i = 0; i < 3; ++i) EXPECT_EQ(chat(false).status, 200);
  EXPECT_EQ(d0.leg_count(), 3U);
  EXPECT_EQ(d1.leg_count(), 3U);

  const json status = json::parse(call("GET", "/status?decisions=1").body);
  ASSERT_EQ(status["decisions"].size(), 1U);
  const json& last = status["decisions"][0];
  EXPECT_EQ(last["decode_worker"], d1.url());
  EXPECT_EQ(last["prefill_worker"], p.url());
  EXPECT_EQ(last["policy"], "locality-band");
  EXPECT_EQ(last["fallback"], "none");
  EXPECT_EQ(last["prompt_tokens"], 10);
  EXPECT_NEAR(last["similarity"].get<double>(), 1, 1e-6);
  EXPECT_NEAR(last["scores"][d0.url()].get<double>(), 0, 1e-6);
  EXPECT_EQ(status["cohorts"]["count"], 2);
  EXPECT_EQ(status["cohorts"]["rho"], 0.5);
  EXPECT_TRUE(has_metric("kindred_router_similarity_count 6"));
}

TEST_F(PdFlowTest, LocalityDegradesToLoadAndSaysWhy) {
  FakeWorker& p = prefill();
  decode();
  decode();
  options_.cohorts = cohort_file({0, 1});
  start();
  p.set_counts("");
  EXPECT_EQ(chat(true).body, kWholeStream);
  EXPECT_TRUE(has_metric("kindred_router_fallbacks_total{reason=\"no_counts\"} 1"));
  p.set_counts(R"({"v":1,"dtype":"u16","layers":[0],"experts":4,"top_k":1,"tokens":10,"data":"AAAA"})");
  EXPECT_EQ(chat(true).body, kWholeStream);
  EXPECT_TRUE(has_metric("kindred_router_bad_counts_total 1"));
  EXPECT_TRUE(has_metric("kindred_router_fallbacks_total{reason=\"no_counts\"} 2"));
  expert::ExpertCounts wide(expert::ExpertShape{{0}, 8, 1});
  wide.tokens = 3;
  wide.data[7] = 3;
  p.set_counts(expert::counts_to_json(wide));
  EXPECT_EQ(chat(true).body, kWholeStream);
  EXPECT_TRUE(has_metric("kindred_router_fallbacks_total{reason=\"shape_mismatch\"} 1"));
}

TEST_F(PdFlowTest, CohortsOfAnotherModelDegradeToLoad) {
  prefill();
  decode();
  decode();
  options_.cohorts = cohort_file({0, 1}, "another-model");
  start();
  EXPECT_EQ(chat(true).body, kWholeStream);
  EXPECT_TRUE(has_metric("kindred_router_fallbacks_total{reason=\"other_model\"} 1"));
}

TEST_F(PdFlowTest, StatusHoldsNothingOfThePrompt) {
  prefill();
  decode();
  start();
  chat(true);
  chat(false);
  for (const char* path : {"/status", "/metrics", "/v1/models"}) {
    const Answer answer = call("GET", path);
    EXPECT_EQ(answer.status, 200);
    EXPECT_EQ(answer.body.find("canary-prompt"), std::string::npos) << path;
    EXPECT_EQ(answer.body.find("AAAA"), std::string::npos) << path;
  }
  EXPECT_EQ(json::parse(call("GET", "/status").body)["decisions"].size(), 2U);
}

TEST_F(PdFlowTest, LoadCountsFromTheDecisionOn) {
  options_.decode_policy = {.name = "least-loaded", .tie_break = "lowest-index"};
  prefill();
  FakeWorker& d0 = decode();
  FakeWorker& d1 = decode();
  Gate gate;
  for (FakeWorker* d : {&d0, &d1}) {
    d->play([&gate, d](const SeenLeg& leg, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
      co_await gate.wait();
      co_await d->answer_decode(leg, writer);
    });
  }
  start();
  std::vector<ConnectionPtr> clients;
  for (int i = 0; i < 8; ++i) clients.push_back(open("POST", "/v1/chat/completions", chat_body(true)));
  ASSERT_TRUE(eventually([&] { return d0.leg_count() + d1.leg_count() == 8; }));
  EXPECT_EQ(d0.leg_count(), 4U);
  EXPECT_EQ(in_flight(), 8);
  gate.open();
  for (auto& client : clients) EXPECT_EQ(parse_answer(client->read_to_end()).body, kWholeStream);
  EXPECT_TRUE(eventually([&] { return in_flight() == 0; }));
}

}  // namespace
}  // namespace kindred::router::testing
