// The router as a server: limits, admin endpoints, plain workers, start-up, shutdown.

#include "router/router.h"
#include "base/json.h"

#include "router/testing.h"

namespace kindred::router::testing {
namespace {

using json = Json;

class RouterServerTest : public RouterTest {
 protected:
  std::string make_error(RouterOptions options) {
    return loop_.call([&] {
      const auto made = Router::make(loop_.executor(), std::move(options), clock_);
      return made.ok() ? std::string() : made.error().message;
    });
  }
};

TEST_F(RouterServerTest, RefusesBadBodiesBeforeAnyWorkerSeesThem) {
  FakeWorker& p = add(Role::kPrefill);
  add(Role::kDecode);
  start();
  const std::string bad[] = {
      "",
      "{",
      "[]",
      R"({"model":1})",
      R"({"model":"m","messages":[],"n":"2"})",
      R"({"model":"m","messages":[],"kv_transfer_params":{}})",
      R"({"model":"m","messages":[],"bootstrap_host":"x"})",
  };
  for (const std::string& body : bad) {
    for (const char* path : {"/v1/chat/completions", "/v1/completions"}) {
      const Answer answer = call("POST", path, body);
      EXPECT_EQ(answer.status, 400) << body;
      EXPECT_EQ(json::parse(answer.body)["error"]["type"], "invalid_request_error") << body;
    }
  }
  EXPECT_EQ(p.leg_count(), 0U);
  EXPECT_EQ(in_flight(), 0);
}

TEST_F(RouterServerTest, AnUnknownModelIsA404ThatListsWhatIsServed) {
  add(Role::kPrefill);
  add(Role::kDecode);
  start();
  const Answer answer = call("POST", "/v1/chat/completions", R"({"model":"nope","messages":[]})");
  EXPECT_EQ(answer.status, 404);
  const json error = json::parse(answer.body)["error"];
  EXPECT_EQ(error["code"], "model_not_found");
  EXPECT_NE(error["message"].get<std::string>().find("served here: m"), std::string::npos);
  EXPECT_EQ(call("POST", "/v1/chat/completions", R"({"messages":[]})").status, 200);  // there is only one
}

TEST_F(RouterServerTest, UnknownPathsAndMethods) {
  add(Role::kPrefill);
  add(Role::kDecode);
  start();
  EXPECT_EQ(call("GET", "/nope").status, 404);
  EXPECT_EQ(call("POST", "/v1/kv_transfer/release", R"({"lease":"x"})").status, 404);
  const Answer get = call("GET", "/v1/chat/completions");
  EXPECT_EQ(get.status, 405);
  EXPECT_EQ(*get.headers.find("Allow"), "POST");
  EXPECT_EQ(call("POST", "/metrics", "{}").status, 405);
  EXPECT_EQ(call("GET", "/status?decisions=x").status, 400);
}

TEST_F(RouterServerTest, BodiesOverTheLimitAre413) {
  options_.body_bytes = 1000;
  FakeWorker& p = add(Role::kPrefill);
  add(Role::kDecode);
  start();
  const Answer answer = chat(true, R"(,"pad":")" + std::string(2000, 'x') + "\"");
  EXPECT_EQ(answer.status, 413);
  EXPECT_TRUE(json::parse(answer.body)["error"].is_object());
  EXPECT_EQ(p.leg_count(), 0U);
}

TEST_F(RouterServerTest, RequestsOverTheLimitAre429ForTheWholeLifeOfAStream) {
  options_.max_inflight = 1;
  options_.queue = 0;
  FakeWorker& p = add(Role::kPrefill);
  FakeWorker& d = add(Role::kDecode);
  Gate gate;
  d.play([&](const SeenLeg& leg, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
    co_await gate.wait();
    co_await d.answer_decode(leg, writer);
  });
  start();
  auto first = open("POST", "/v1/chat/completions", chat_body(true));
  first->read_until("\"one\"");
  const Answer answer = chat(true);
  EXPECT_EQ(answer.status, 429);
  EXPECT_EQ(*answer.headers.find("Retry-After"), "1");
  EXPECT_EQ(call("GET", "/health").status, 200);  // not counted
  EXPECT_EQ(p.leg_count(), 1U);
  gate.open();
  first->read_to_end();
  EXPECT_TRUE(eventually([&] { return chat(true).status == 200; }));
  EXPECT_TRUE(has_metric("kindred_router_requests_total{outcome=\"rejected\",status=\"429\"} 1"));
}

TEST_F(RouterServerTest, SpeaksOfItself) {
  add(Role::kPrefill);
  FakeWorker& d = add(Role::kDecode);
  add(Role::kBoth, "");
  fakes_.back()->model = "other";
  start();
  const json models = json::parse(call("GET", "/v1/models").body);
  EXPECT_EQ(models["object"], "list");
  ASSERT_EQ(models["data"].size(), 2U);
  EXPECT_EQ(models["data"][0]["id"], "m");
  EXPECT_EQ(models["data"][1]["id"], "other");
  EXPECT_EQ(call("GET", "/health").status, 200);
  EXPECT_EQ(call("GET", "/ready").status, 200);
  EXPECT_EQ(call("HEAD", "/health").status, 200);
  const json status = json::parse(call("GET", "/status").body);
  ASSERT_EQ(status["workers"].size(), 3U);
  EXPECT_EQ(status["workers"][1]["url"], d.url());
  EXPECT_EQ(status["workers"][1]["role"], "decode");
  EXPECT_EQ(status["workers"][1]["health"], "up");
  EXPECT_EQ(status["workers"][1]["fingerprint"], "f0");
  EXPECT_EQ(status["workers"][2]["dialect"], "openai");
  EXPECT_EQ(status["policy"]["decode"], "locality-band");
  EXPECT_TRUE(status["cohorts"].is_null());
  EXPECT_TRUE(has_metric("kindred_router_worker_up{role=\"decode\",worker=\"" + d.url() + "\"} 1"));
  EXPECT_TRUE(has_metric("kindred_router_in_flight{role=\"decode\",worker=\"" + d.url() + "\"} 0"));
  const Answer made = chat(false);
  EXPECT_TRUE(made.headers.find("X-Request-Id")->starts_with("req-"));
}

TEST_F(RouterServerTest, WorkersMayComeLateGoAndComeBack) {
  add(Role::kPrefill);
  FakeWorker& d = add(Role::kDecode);
  d.kill();
  start(/*wait_until_ready=*/false);
  EXPECT_EQ(call("GET", "/health").status, 200);
  EXPECT_TRUE(
      eventually([&] { return call("GET", "/ready").body.find("no decode worker is up") != std::string::npos; }));
  d.revive();
  EXPECT_TRUE(eventually([&] { return ready(); }));
  d.set_health(503);  // draining: out at once
  EXPECT_TRUE(eventually([&] { return !ready(); }));
  d.set_health(200);
  EXPECT_TRUE(eventually([&] { return ready(); }));
}

TEST_F(RouterServerTest, PlainWorkersGetBytesAsTheyAre) {
  FakeWorker& w = add(Role::kBoth, "");
  start();
  const std::string body = chat_body(false, R"(,"return_routed_experts":true,"x":1.0e0)");
  const Answer answer = call("POST", "/v1/chat/completions?a=1", body, "X-Custom: 7\r\nConnection: close\r\n");
  EXPECT_EQ(answer.body, R"({"text":"plain"})");
  EXPECT_EQ(*answer.headers.find("X-Served-By"), w.url());
  ASSERT_EQ(w.leg_count(), 1U);
  EXPECT_EQ(w.legs()[0].body, body);
  EXPECT_EQ(w.legs()[0].leg, "");
  EXPECT_EQ(*w.legs()[0].headers.find("X-Custom"), "7");
  const Answer stream = chat(true);
  EXPECT_TRUE(stream.complete);
  EXPECT_TRUE(stream.body.ends_with("data: [DONE]\n\n"));
  EXPECT_TRUE(has_metric("kindred_router_ttft_seconds_count 1"));
  EXPECT_EQ(call("POST", "/v1/embeddings", R"({"model":"m","input":"x"})").status, 200);
}

TEST_F(RouterServerTest, PlainWorkersShareTheLoadAndStandInForEachOther) {
  options_.failures_until_out = 100;  // not what is tested here
  FakeWorker& w0 = add(Role::kBoth, "");
  FakeWorker& w1 = add(Role::kBoth, "");
  start();
  for (int i = 0; i < 4; ++i) EXPECT_EQ(chat(false).status, 200);
  EXPECT_EQ(w0.leg_count(), 2U);  // ties in rotation
  EXPECT_EQ(w1.leg_count(), 2U);
  w0.play(refuse(500, "internal_error"));
  for (int i = 0; i < 4; ++i) EXPECT_EQ(chat(false).status, 200);
  w0.play([](const SeenLeg&, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
    co_await writer.start(200, events_type());
    co_await writer.write("data: {}\n\n");
    co_await pause_for(20ms);
    writer.abort();
  });
  int cut = 0;
  for (int i = 0; i < 4; ++i) {
    const Answer answer = chat(true);
    const bool error = answer.body.find("data: {\"error\"") != std::string::npos;
    EXPECT_EQ(error, !answer.complete);
    cut += error ? 1 : 0;
  }
  EXPECT_GT(cut, 0);
  EXPECT_TRUE(eventually([&] { return in_flight() == 0; }));
}

TEST_F(RouterServerTest, PairsAreTakenBeforePlainWorkersAndReplacedByThem) {
  FakeWorker& p = add(Role::kPrefill);
  FakeWorker& d = add(Role::kDecode);
  FakeWorker& w = add(Role::kBoth, "");
  start();
  EXPECT_EQ(chat(false).status, 200);
  EXPECT_EQ(p.leg_count(), 1U);
  EXPECT_EQ(w.leg_count(), 0U);
  d.kill();
  EXPECT_TRUE(eventually([&] { return router_->core().fleet.status()[1].health == fleet::Health::kDown; }));
  EXPECT_EQ(chat(false).body, R"({"text":"plain"})");
}

TEST_F(RouterServerTest, TokenisingGoesToPrefillWorkers) {
  FakeWorker& p = add(Role::kPrefill);
  add(Role::kDecode);
  start();
  EXPECT_EQ(call("POST", "/tokenize", R"({"model":"m","prompt":"x"})").status, 200);
  EXPECT_EQ(p.leg_count(), 1U);
  EXPECT_EQ(p.legs()[0].leg, "");
}

TEST_F(RouterServerTest, SaysWhatIsWrongWithItsOptions) {
  EXPECT_NE(make_error({}).find("no workers"), std::string::npos);
  RouterOptions options;
  options.prefill = {"http://127.0.0.1:1"};
  EXPECT_NE(make_error(options).find("no decode worker"), std::string::npos);
  options.decode = {"http://127.0.0.1:2", "http://127.0.0.1:3"};
  EXPECT_EQ(make_error(options), "");
  options.cohorts = cohort_file({0, 1, 2});
  const std::string counts = make_error(options);
  EXPECT_NE(counts.find("3 cohorts"), std::string::npos) << counts;
  EXPECT_NE(counts.find("2 decode workers"), std::string::npos) << counts;
  options.cohorts = "/nonexistent.safetensors";
  EXPECT_NE(make_error(options), "");
  options.cohorts.clear();
  options.decode = {"http://127.0.0.1:1"};
  EXPECT_NE(make_error(options).find("a worker already"), std::string::npos);
  options.decode = {"ftp://x"};
  EXPECT_NE(make_error(options).find("ftp://x"), std::string::npos);
  options.decode = {"http://127.0.0.1:2"};
  options.decode_policy.name = "locality-bend";
  EXPECT_NE(make_error(options), "");
}

TEST_F(RouterServerTest, APortInUseIsNamed) {
  FakeWorker& w = add(Role::kBoth, "");
  options_.port = net::parse_endpoint(w.url())->port;
  loop_.call([&] {
    auto made = Router::make(loop_.executor(), options_, clock_);
    EXPECT_TRUE(made.ok());
    const auto port = (*made)->listen();
    EXPECT_FALSE(port.ok());
    EXPECT_NE(port.error().message.find("in use"), std::string::npos);
    return 0;
  });
}

TEST_F(RouterServerTest, DrainingLetsStreamsFinish) {
  add(Role::kPrefill);
  FakeWorker& d = add(Role::kDecode);
  Gate gate;
  d.play([&](const SeenLeg& leg, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
    co_await gate.wait();
    co_await d.answer_decode(leg, writer);
  });
  start();
  auto client = open("POST", "/v1/chat/completions", chat_body(true));
  const std::string begin = client->read_until("\"one\"");
  auto drained = loop_.start([this]() -> net::Task<void> { co_await router_->drain(5s); });
  EXPECT_TRUE(eventually([&] { return !net::testing::raw_connect(port_).open(); }));
  gate.open();
  EXPECT_TRUE(parse_answer(begin + client->read_to_end()).complete);
  EXPECT_EQ(drained.wait_for(2s), std::future_status::ready);
  EXPECT_EQ(loop_.call([this] { return router_->core().background(); }), 0U);
}

}  // namespace
}  // namespace kindred::router::testing
