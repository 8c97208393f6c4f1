// Workers that fail, seen from outside: when they get no more requests, when they do again, and what the
// health endpoints say meanwhile.

#include "base/json.h"
#include "router/testing.h"

namespace kindred::router::testing {
namespace {

constexpr std::chrono::milliseconds kNeverInThisTest{600'000};

// Starts a stream and breaks it off.
net::Task<void> cut(const SeenLeg&, net::Request&, net::ResponseWriter& writer) {
  co_await writer.start(200, events_type());
  co_await writer.write("data: {}\n\n");
  co_await pause_for(5ms);
  writer.abort();
}

class BreakerFlow : public RouterTest {
 protected:
  void SetUp() override {
    options_.slow_start_ms = 0ms;
    options_.breaker_open_ms = kNeverInThisTest;
    options_.decode_policy = {.name = "round-robin"};
  }
  fleet::WorkerStatus worker(size_t at) { return router_->core().fleet.status()[at]; }
};

TEST_F(BreakerFlow, FaultyAnswersTakeAWorkerOutThoughItsChecksSucceed) {
  FakeWorker& bad = add(Role::kBoth, "");
  FakeWorker& good = add(Role::kBoth, "");
  bad.play(refuse(500, "internal_error"));
  start();
  for (int i = 0; i < 12; ++i) EXPECT_EQ(chat(false).status, 200);
  EXPECT_EQ(bad.leg_count(), 3U);
  EXPECT_EQ(good.leg_count(), 12U);
  EXPECT_EQ(worker(0).breaker, fleet::BreakerState::kOpen);
  EXPECT_EQ(worker(0).health, fleet::Health::kUp);
  EXPECT_TRUE(has_metric("kindred_router_breaker_open{role=\"both\",worker=\"" + bad.url() + "\"} 1"));
  EXPECT_EQ(Json::parse(call("GET", "/status").body)["workers"][0]["breaker"], "open");
}

TEST_F(BreakerFlow, StreamsThatBreakAndAnswersThatNeverComeAreFaultsToo) {
  FakeWorker& cuts = add(Role::kBoth, "");
  FakeWorker& hangs = add(Role::kBoth, "");
  FakeWorker& good = add(Role::kBoth, "");
  options_.prefill_deadline_ms = 50ms;
  cuts.play(cut);
  hangs.play(hang);
  start();
  for (int i = 0; i < 20; ++i) chat(true);
  EXPECT_EQ(cuts.leg_count(), 3U);
  EXPECT_EQ(hangs.leg_count(), 3U);
  EXPECT_EQ(good.leg_count(), 14U);
}

TEST_F(BreakerFlow, ClientErrorsAreNoFaults) {
  FakeWorker& w = add(Role::kBoth, "");
  add(Role::kBoth, "");
  w.play(refuse(400, "invalid_value"));
  start();
  for (int i = 0; i < 12; ++i) chat(false);
  EXPECT_EQ(w.leg_count(), 6U);
  EXPECT_EQ(worker(0).breaker, fleet::BreakerState::kClosed);
}

TEST_F(BreakerFlow, OneSuccessAmongProbesBringsItBack) {
  options_.breaker_open_ms = 1ms;
  options_.breaker_probes = 1;
  FakeWorker& w = add(Role::kBoth, "");
  FakeWorker& other = add(Role::kBoth, "");
  w.play(cut);
  start();
  // Until it is open: whoever gets there, the third fault in a row does it.
  ASSERT_TRUE(eventually([&] {
    chat(true);
    return worker(0).breaker != fleet::BreakerState::kClosed;
  }));
  Gate gate;
  const size_t before = w.leg_count();
  w.play([&](const SeenLeg& leg, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
    co_await gate.wait();
    co_await w.answer_plain(leg, writer);
  });
  ASSERT_TRUE(eventually([&] { return worker(0).breaker == fleet::BreakerState::kHalfOpen; }));
  std::vector<ConnectionPtr> clients;
  for (int i = 0; i < 6; ++i) clients.push_back(open("POST", "/v1/chat/completions", chat_body(false)));
  ASSERT_TRUE(eventually([&] { return w.leg_count() == before + 1 && other.leg_count() >= 5; }));
  gate.open();
  for (auto& client : clients) EXPECT_EQ(parse_answer(client->read_to_end()).status, 200);
  EXPECT_EQ(w.leg_count(), before + 1);  // one probe at a time
  EXPECT_EQ(worker(0).breaker, fleet::BreakerState::kClosed);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(chat(false).status, 200);
  EXPECT_EQ(w.leg_count(), before + 3);
}

TEST_F(BreakerFlow, ARestartedWorkerIsBackWithinOneHealthIntervalAndStartsSlowly) {
  options_.slow_start_ms = 600'000ms;
  options_.decode_policy = {.name = "least-loaded"};
  FakeWorker& w = add(Role::kBoth, "");
  FakeWorker& other = add(Role::kBoth, "");
  start();
  w.kill();
  for (int i = 0; i < 4; ++i) EXPECT_EQ(chat(false).status, 200);
  EXPECT_TRUE(eventually([&] { return worker(0).health == fleet::Health::kDown; }));
  EXPECT_TRUE(eventually([&] { return !worker(0).problem.empty(); }));
  std::this_thread::sleep_for(120ms);  // a check has failed
  w.revive();
  const auto revived = std::chrono::steady_clock::now();
  ASSERT_TRUE(eventually([&] { return worker(0).health == fleet::Health::kUp; }));
  EXPECT_LT(std::chrono::steady_clock::now() - revived, 2s);  // an interval is 50 ms here
  EXPECT_LT(worker(0).share, 0.2);
  const size_t before = w.leg_count(), others = other.leg_count();
  for (int i = 0; i < 10; ++i) EXPECT_EQ(chat(false).status, 200);
  EXPECT_EQ(w.leg_count(), before);  // idle, and still not chosen: it counts as if it had nine requests
  EXPECT_EQ(other.leg_count(), others + 10);
}

TEST_F(BreakerFlow, ChecksThatFailLeaveLoadAsItIs) {
  FakeWorker& w = add(Role::kBoth, "");
  Gate gate;
  w.play([&](const SeenLeg& leg, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
    co_await gate.wait();
    co_await w.answer_plain(leg, writer);
  });
  start();
  auto client = open("POST", "/v1/chat/completions", chat_body(false));
  ASSERT_TRUE(eventually([&] { return in_flight() == 1; }));
  w.set_health(503);
  ASSERT_TRUE(eventually([&] { return worker(0).health == fleet::Health::kDown; }));
  EXPECT_EQ(in_flight(), 1);
  w.set_health(200);
  ASSERT_TRUE(eventually([&] { return worker(0).health == fleet::Health::kUp; }));
  EXPECT_EQ(in_flight(), 1);
  gate.open();
  EXPECT_EQ(parse_answer(client->read_to_end()).status, 200);
  EXPECT_TRUE(eventually([&] { return in_flight() == 0; }));
}

TEST_F(BreakerFlow, HealthAnswersByWhatIsServedPerModel) {
  FakeWorker& m = add(Role::kBoth, "");
  FakeWorker& other = add(Role::kBoth, "");
  other.model = "other";
  start();
  ASSERT_TRUE(eventually([&] { return call("GET", "/ready?model=other").status == 200; }));
  EXPECT_EQ(call("GET", "/health?model=m").status, 200);
  EXPECT_EQ(call("GET", "/health?model=nope").status, 404);
  EXPECT_NE(call("GET", "/health?model=nope").body.find("m, other"), std::string::npos);
  other.set_health(503);
  ASSERT_TRUE(eventually([&] { return call("GET", "/health?model=other").status == 503; }));
  EXPECT_NE(call("GET", "/ready?model=other").body.find("no worker of 'other' is up"), std::string::npos);
  EXPECT_EQ(call("GET", "/health?model=m").status, 200);
  EXPECT_EQ(call("GET", "/ready").status, 200);
  const Json health = Json::parse(call("GET", "/health").body);
  EXPECT_EQ(health["models"]["m"], true);
  EXPECT_EQ(health["models"]["other"], false);
  m.set_health(503);
  EXPECT_TRUE(eventually([&] { return call("GET", "/ready").status == 503; }));
  const Answer alive = call("GET", "/health");
  EXPECT_EQ(alive.status, 200);  // the process lives
  EXPECT_EQ(Json::parse(alive.body)["status"], "not_serving");
}

}  // namespace
}  // namespace kindred::router::testing
