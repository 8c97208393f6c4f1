// The PD flow against scripted workers: refusals, deaths, hangs, clients that leave.

#include "base/json.h"
#include "router/testing.h"

namespace kindred::router::testing {
namespace {

using json = Json;

TEST_F(PdFlowTest, RetriesDecodeOnAnotherWorker) {
  const std::pair<int, const char*> refusals[] = {{500, "internal_error"},       {503, "unavailable"},
                                                  {409, "fingerprint_mismatch"}, {403, "peer_not_configured"},
                                                  {429, "queue_full"},           {502, "kv_pull_failed"}};
  options_.decode_policy = {.name = "round-robin", .tie_break = "lowest-index"};
  FakeWorker& p = prefill();
  FakeWorker& d0 = decode();
  FakeWorker& d1 = decode();
  start();
  for (const auto& [status, code] : refusals) {
    d0.play(refuse(status, code));
    d1.play(nullptr);
    // Both orders of the round, so that one of them meets the refusal.
    for (int i = 0; i < 2; ++i) {
      const Answer answer = chat(true);
      EXPECT_EQ(answer.body, kWholeStream) << status;
      EXPECT_TRUE(answer.complete) << status;
    }
  }
  d0.play(hang_up);
  for (int i = 0; i < 2; ++i) EXPECT_EQ(chat(false).status, 200);
  EXPECT_GE(d0.leg_count(), 6U);
  EXPECT_TRUE(eventually([&] { return p.released().size() == p.leg_count(); }));
  EXPECT_TRUE(eventually([&] { return in_flight() == 0; }));
}

TEST_F(PdFlowTest, RetriesDecodeWhenAConnectIsRefused) {
  options_.decode_policy = {.name = "round-robin"};
  prefill();
  FakeWorker& d0 = decode();
  FakeWorker& d1 = decode();
  options_.failures_until_out = 1000;  // only the request path may notice
  start();
  d0.kill();
  for (int i = 0; i < 4; ++i) EXPECT_EQ(chat(true).body, kWholeStream);
  EXPECT_EQ(d1.leg_count(), 4U);
  EXPECT_EQ(router_->core().fleet.status()[1].health, fleet::Health::kDown);
  d0.revive();
  EXPECT_TRUE(eventually([&] { return router_->core().fleet.status()[1].health == fleet::Health::kUp; }));
}

TEST_F(PdFlowTest, GivesUpInTheStreamsOwnForm) {
  FakeWorker& p = prefill();
  FakeWorker& d = decode();
  d.play(refuse(503, "unavailable"));
  start();
  const Answer answer = chat(true);
  EXPECT_EQ(answer.status, 200);
  EXPECT_FALSE(answer.complete);
  EXPECT_NE(answer.body.find("\"one\""), std::string::npos);
  EXPECT_NE(answer.body.find("data: {\"error\":{\"message\":\"scripted\""), std::string::npos);
  EXPECT_EQ(answer.body.find("[DONE]"), std::string::npos);
  EXPECT_TRUE(answer.body.ends_with("\n\n"));
  EXPECT_TRUE(eventually([&] { return p.released().size() == 1; }));
  EXPECT_TRUE(has_metric("kindred_router_requests_total{outcome=\"cut\",status=\"200\"} 1"));

  const Answer whole = chat(false);
  EXPECT_EQ(whole.status, 503);
  EXPECT_EQ(json::parse(whole.body)["error"]["code"], "unavailable");
  EXPECT_TRUE(eventually([&] { return p.released().size() == 2 && in_flight() == 0; }));
}

TEST_F(PdFlowTest, DecodeDyingMidStreamIsAnErrorEventAndACut) {
  FakeWorker& p = prefill();
  FakeWorker& d = decode();
  d.play([](const SeenLeg&, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
    co_await writer.start(200, events_type());
    co_await writer.write("data: {\"x\":2}\n\n");
    co_await pause_for(20ms);
    writer.abort();
  });
  start();
  const Answer answer = chat(true);
  EXPECT_EQ(answer.status, 200);
  EXPECT_FALSE(answer.complete);
  const size_t two = answer.body.find("data: {\"x\":2}\n\n");
  const size_t error = answer.body.find("data: {\"error\":");
  ASSERT_NE(two, std::string::npos);
  ASSERT_NE(error, std::string::npos);
  EXPECT_LT(two, error);
  EXPECT_EQ(answer.body.find("[DONE]"), std::string::npos);
  EXPECT_TRUE(eventually([&] { return p.released().size() == 1 && in_flight() == 0; }));
}

TEST_F(PdFlowTest, ABrokenEventIsEndedSoThatTheErrorIsOneOfItsOwn) {
  prefill();
  FakeWorker& d = decode();
  d.play([](const SeenLeg&, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
    co_await writer.start(200, events_type());
    co_await writer.write("data: {\"x\":");
    co_await pause_for(20ms);
    writer.abort();
  });
  start();
  const Answer answer = chat(true);
  EXPECT_FALSE(answer.complete);
  EXPECT_NE(answer.body.find("data: {\"x\":\n\ndata: {\"error\":{"), std::string::npos) << answer.body;
  EXPECT_TRUE(answer.body.ends_with("\n\n"));
}

TEST_F(PdFlowTest, RetriesPrefillOnAnotherWorker) {
  options_.prefill_policy.name = "round-robin";
  FakeWorker& p0 = prefill();
  FakeWorker& p1 = prefill();
  decode();
  start();
  p0.play(refuse(500, "internal_error"));
  for (int i = 0; i < 2; ++i) EXPECT_EQ(chat(true).body, kWholeStream);
  p0.play(hang_up);
  for (int i = 0; i < 2; ++i) EXPECT_EQ(chat(false).status, 200);
  p0.kill();
  for (int i = 0; i < 2; ++i) EXPECT_EQ(chat(true).body, kWholeStream);
  EXPECT_EQ(p1.leg_count(), 6U);
  EXPECT_TRUE(eventually([&] { return in_flight() == 0; }));
}

TEST_F(PdFlowTest, APrefillPoolThatIsDownIsA503) {
  FakeWorker& p = prefill();
  decode();
  options_.failures_until_out = 1000;
  start();
  p.kill();
  for (int i = 0; i < 2; ++i) {  // found out by the first, known to the second
    const Answer answer = chat(true);
    EXPECT_EQ(answer.status, 503);
    EXPECT_TRUE(answer.complete);
    EXPECT_TRUE(json::parse(answer.body)["error"].is_object());
  }
}

TEST_F(PdFlowTest, RestartsFromPrefillWhenTheKvIsLost) {
  FakeWorker& p = prefill();
  FakeWorker& d0 = decode();
  FakeWorker& d1 = decode();
  std::atomic<int> legs{0};
  const auto first_fails = [&legs](FakeWorker& fake) -> Script {
    return [&](const SeenLeg& leg, net::Request& request, net::ResponseWriter& writer) -> net::Task<void> {
      if (legs++ == 0) co_await refuse(502, "kv_pull_failed")(leg, request, writer);
      else co_await fake.answer_decode(leg, writer);
    };
  };
  d0.play(first_fails(d0));
  d1.play(first_fails(d1));
  start();
  EXPECT_EQ(chat(false).status, 200);
  EXPECT_EQ(p.leg_count(), 2U);
  EXPECT_TRUE(eventually([&] { return p.released() == std::vector<std::string>({"lease-1", "lease-2"}); }));

  // With the first event at the client the other decode worker is tried, and prefill is not run again.
  legs = 0;
  EXPECT_EQ(chat(true).body, kWholeStream);
  EXPECT_EQ(p.leg_count(), 3U);
}

TEST_F(PdFlowTest, RestartsAlsoWithTheOnlyDecodeWorkerThereIs) {
  FakeWorker& p = prefill();
  FakeWorker& d = decode();
  std::atomic<int> legs{0};
  d.play([&](const SeenLeg& leg, net::Request& request, net::ResponseWriter& writer) -> net::Task<void> {
    if (legs++ == 0) co_await refuse(502, "kv_pull_failed")(leg, request, writer);
    else co_await d.answer_decode(leg, writer);
  });
  start();
  EXPECT_EQ(chat(false).status, 200);
  EXPECT_EQ(p.leg_count(), 2U);
  d.play(refuse(502, "kv_pull_failed"));
  const Answer answer = chat(false);
  EXPECT_EQ(answer.status, 502);
  EXPECT_EQ(json::parse(answer.body)["error"]["code"], "kv_pull_failed");
  EXPECT_EQ(p.leg_count(), 4U);  // restarted once, not for ever
  EXPECT_TRUE(eventually([&] { return p.released().size() == 4 && in_flight() == 0; }));
}

TEST_F(PdFlowTest, ADecodeReplyThatIsNoStreamIsNotRelayedIntoOne) {
  prefill();
  FakeWorker& d = decode();
  d.play([](const SeenLeg&, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
    co_await writer.send(200, json_type(), R"({"text":"whole"})");
  });
  start();
  const Answer answer = chat(true);
  EXPECT_FALSE(answer.complete);
  EXPECT_EQ(answer.body.find("whole"), std::string::npos);
  EXPECT_NE(answer.body.find("data: {\"error\""), std::string::npos);
}

TEST_F(PdFlowTest, AMalformedPrefillReplyIsA502) {
  FakeWorker& p = prefill();
  FakeWorker& d = decode();
  p.play([](const SeenLeg&, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
    net::Headers headers;
    headers.add("Content-Type", "application/vnd.kindred.prefill+json");
    co_await writer.send(200, std::move(headers), R"({"v":1,"finished":fal)");
  });
  start();
  EXPECT_EQ(chat(true).status, 502);
  p.play([](const SeenLeg&, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
    co_await writer.send(200, json_type(), R"({"choices":[]})");
  });
  EXPECT_EQ(chat(false).status, 502);
  EXPECT_EQ(d.leg_count(), 0U);
}

TEST_F(PdFlowTest, AnswersOfTheClientsOwnFaultPassThroughAndHarmNobody) {
  FakeWorker& p = prefill();
  FakeWorker& d = decode();
  start();
  p.play(refuse(400, "context_length_exceeded"));
  for (int i = 0; i < 5; ++i) {
    const Answer answer = chat(true);
    EXPECT_EQ(answer.status, 400);
    EXPECT_EQ(json::parse(answer.body)["error"]["code"], "context_length_exceeded");
  }
  EXPECT_EQ(p.leg_count(), 5U);  // not retried
  EXPECT_EQ(d.leg_count(), 0U);
  for (const auto& worker : router_->core().fleet.status()) EXPECT_EQ(worker.health, fleet::Health::kUp);
  p.play(nullptr);
  d.play(refuse(400, "bad_logit_bias"));
  EXPECT_EQ(chat(false).status, 400);
  d.play(refuse(400, "handoff_invalid"));
  EXPECT_EQ(chat(false).status, 502);  // the router's fault, not the client's
}

TEST_F(PdFlowTest, AClientThatLeavesCancelsTheDecodeLeg) {
  FakeWorker& p = prefill();
  FakeWorker& d = decode();
  d.play([&](const SeenLeg&, net::Request& request, net::ResponseWriter& writer) -> net::Task<void> {
    co_await writer.start(200, events_type());
    for (int i = 0; i < 1000 && !request.cancel.cancelled(); ++i) {
      co_await writer.write("data: {\"x\":1}\n\n");
      co_await pause_for(5ms);
    }
  });
  start();
  auto connection = open("POST", "/v1/chat/completions", chat_body(true));
  connection->read_until("data: {\"x\":1}");
  EXPECT_EQ(in_flight(), 1);
  connection->close();
  EXPECT_TRUE(eventually([&] { return d.cancelled() == 1 && in_flight() == 0 && p.released().size() == 1; }, 1s));
  EXPECT_TRUE(eventually([&] { return has_metric("kindred_router_requests_in_flight 0"); }));
  EXPECT_TRUE(has_metric("kindred_router_requests_total{outcome=\"cancelled\",status=\"200\"} 1"));
}

TEST_F(PdFlowTest, AClientThatLeavesBeforeDecodeAnswersReleasesTheLease) {
  FakeWorker& p = prefill();
  FakeWorker& d = decode();
  d.play(hang);
  start();
  for (const bool stream : {true, false}) {
    const size_t before = p.released().size();
    auto connection = open("POST", "/v1/chat/completions", chat_body(stream));
    ASSERT_TRUE(eventually([&] { return d.leg_count() == before + 1; }));
    connection->close();
    EXPECT_TRUE(eventually([&] { return in_flight() == 0 && p.released().size() == before + 1; }, 1s)) << stream;
  }
}

TEST_F(PdFlowTest, AClientThatLeavesDuringPrefillCancelsIt) {
  FakeWorker& p = prefill();
  FakeWorker& d = decode();
  p.play(hang);
  start();
  auto connection = open("POST", "/v1/chat/completions", chat_body(true));
  ASSERT_TRUE(eventually([&] { return p.leg_count() == 1; }));
  connection->close();
  EXPECT_TRUE(eventually([&] { return p.cancelled() == 1 && in_flight() == 0; }, 1s));
  EXPECT_EQ(d.leg_count(), 0U);
}

TEST_F(PdFlowTest, LegsThatHangTimeOut) {
  options_.prefill_deadline_ms = 100ms;
  options_.decode_deadline_ms = 100ms;
  options_.idle_deadline_ms = 100ms;
  FakeWorker& p = prefill();
  FakeWorker& d = decode();
  start();
  p.play(hang);
  EXPECT_EQ(chat(true).status, 504);
  p.play(nullptr);
  d.play(hang);
  EXPECT_EQ(chat(false).status, 504);
  d.play([](const SeenLeg&, net::Request& request, net::ResponseWriter& writer) -> net::Task<void> {
    co_await writer.start(200, events_type());
    co_await writer.write("data: {\"x\":2}\n\n");
    for (int i = 0; i < 1000 && !request.cancel.cancelled(); ++i) co_await pause_for(5ms);
  });
  const Answer answer = chat(true);
  EXPECT_FALSE(answer.complete);
  EXPECT_NE(answer.body.find("worker_timeout"), std::string::npos);
  EXPECT_TRUE(eventually([&] { return in_flight() == 0; }, 1s));
}

TEST_F(PdFlowTest, WithoutDecodeWorkersPrefillIsNotSpent) {
  FakeWorker& p = prefill();
  FakeWorker& d = decode();
  start();
  d.kill();
  ASSERT_TRUE(eventually([&] { return !ready(); }));
  const Answer answer = chat(true);
  EXPECT_EQ(answer.status, 503);
  EXPECT_NE(answer.body.find("no decode worker"), std::string::npos);
  EXPECT_NE(answer.headers.find("Retry-After"), nullptr);
  EXPECT_EQ(p.leg_count(), 0U);
}

}  // namespace
}  // namespace kindred::router::testing
