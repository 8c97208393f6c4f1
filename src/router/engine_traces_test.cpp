// Traces good and bad, and what they change.

#include <algorithm>
#include <set>

#include "base/bytes.h"
#include "router/engine_testing.h"

namespace kindred::router::testing {
namespace {

TEST_F(EngineFlow, WhoBypassesTheRouterShiftsItsPicks) {
  FakeWorker& w = kindred(2);
  start();
  tell(0, trace(0));
  tell(0, trace(1));
  EXPECT_EQ(chat(false).status, 200);
  EXPECT_EQ(ranks(w), std::vector<std::string>{"0"});
  tell(0, trace(0, 20'000));  // which this router has never sent
  for (int i = 0; i < 3; ++i) EXPECT_EQ(chat(false).status, 200);
  EXPECT_EQ(ranks(w), (std::vector<std::string>{"0", "1", "1", "1"}));
  tell(0, trace(0));
  tell(0, trace(1, 20'000));
  EXPECT_EQ(chat(false).status, 200);
  EXPECT_EQ(ranks(w).back(), "0");
}

TEST_F(EngineFlow, TwoRoutersShareTheEngines) {
  FakeWorker& w = kindred(2);
  w.play(hang);
  start();
  std::unique_ptr<Router> second;
  const uint16_t first_port = port_;
  const uint16_t second_port = loop_.call([&] {
    second = *Router::make(loop_.executor(), options_, clock_);
    return *second->listen();
  });
  const auto sees = [&](Router& router, uint64_t sequence) {
    const auto engines = router.core().fleet.status()[0].engines;
    return engines.size() == 2 &&
           std::ranges::all_of(engines, [&](const auto& one) { return one.sequence >= sequence; });
  };
  const auto tell_both = [&](std::array<uint64_t, 2> waiting, const std::vector<uint64_t>& received) {
    const uint64_t from = sequence_ + 1;
    ASSERT_TRUE(eventually([&] {
      for (uint32_t rank = 0; rank < 2; ++rank) {
        EngineTrace told = trace(rank, waiting[rank]);
        told.received = received;
        publishers_[0]->publish(told);
      }
      std::this_thread::sleep_for(5ms);
      return sees(*router_, from) && sees(*second, from);
    }));
  };
  tell_both({0, 0}, {});
  std::vector<ConnectionPtr> clients;
  for (int i = 0; i < 20; ++i) {
    port_ = i % 2 == 0 ? first_port : second_port;
    clients.push_back(open("POST", "/v1/chat/completions", chat_body(true)));
    ASSERT_TRUE(eventually([&] { return w.leg_count() == static_cast<size_t>(i) + 1; }));
  }
  port_ = first_port;
  std::vector<std::string> got = ranks(w);
  EXPECT_EQ(std::ranges::count(got, "0"), 10);
  std::vector<uint64_t> ids;
  for (const SeenLeg& leg : w.legs()) ids.push_back(*parse_hex64(header_of(leg, "X-Kindred-Dispatch")));
  EXPECT_EQ(std::set<uint64_t>(ids.begin(), ids.end()).size(), 20U);  // no two routers give one name
  EXPECT_GT(compensation(), 0);
  // Each takes from the trace what is its own, and both believe what it says.
  tell_both({30'000, 100}, ids);
  EXPECT_EQ(compensation(), 0);
  for (const uint16_t port : {first_port, second_port}) {
    port_ = port;
    clients.push_back(open("POST", "/v1/chat/completions", chat_body(true)));
    const size_t before = port == first_port ? 20 : 21;
    ASSERT_TRUE(eventually([&] { return w.leg_count() == before + 1; }));
    EXPECT_EQ(ranks(w).back(), "1");
  }
  port_ = first_port;
  clients.clear();
  loop_.run([&]() -> net::Task<void> { co_await second->drain(500ms); });
  loop_.call([&] {
    second.reset();
    return 0;
  });
}

TEST_F(EngineFlow, BadTracesAreCountedAndChangeNothing) {
  FakeWorker& w = kindred(2);
  start();
  tell(0, trace(0, 9'000));
  tell(0, trace(1));
  const auto errors = [&] { return router_->core().traces.status().errors; };
  // As fleet/engine_trace_test.cpp has them, field by field; here, that they are counted and nothing else.
  std::vector<std::string> bad = {"", "\xc1", "\x93\x01\x02\x03", std::string(1000, '\xff')};
  const std::string good = fleet::encode_trace(trace(0));
  bad.push_back(good.substr(0, good.size() / 2));
  EngineTrace wrong = trace(0);
  wrong.kv_usage = std::numeric_limits<double>::quiet_NaN();
  bad.push_back(fleet::encode_trace(wrong));
  wrong.kv_usage = -1;
  bad.push_back(fleet::encode_trace(wrong));
  wrong = trace(0);
  wrong.expert_pressure = std::numeric_limits<double>::infinity();
  bad.push_back(fleet::encode_trace(wrong));
  for (const std::string& payload : bad) publishers_[0]->send(payload);
  EXPECT_TRUE(eventually([&] { return errors() == bad.size(); })) << errors() << " of " << bad.size();
  EngineTrace future = trace(1);
  future.time_s = 4e9;
  tell(0, future);
  EXPECT_EQ(engine(0, 0).view.waiting_prefill_tokens, 9'000);
  EXPECT_EQ(chat(false).status, 200);
  EXPECT_EQ(ranks(w), std::vector<std::string>{"1"});
  EXPECT_TRUE(has_metric(fmt::format("kindred_router_trace_errors_total {}", bad.size())));
}

TEST_F(EngineFlow, AnEngineThatSaysZeroForEverGetsNoMoreThanItsShare) {
  FakeWorker& w = kindred(2);
  w.play(hang);
  start();
  tell(0, trace(1));
  tell(0, trace(0));
  std::vector<ConnectionPtr> clients;
  for (size_t i = 0; i < 10; ++i) {
    clients.push_back(open("POST", "/v1/chat/completions", chat_body(true)));
    ASSERT_TRUE(eventually([&] { return w.leg_count() == i + 1; }));
    // It says that it has received all, and that there is nothing to do.
    EngineTrace liar = trace(0);
    for (const SeenLeg& leg : w.legs()) liar.received.push_back(*parse_hex64(header_of(leg, "X-Kindred-Dispatch")));
    tell(0, liar);
  }
  const std::vector<std::string> got = ranks(w);
  EXPECT_EQ(std::ranges::count(got, "0"), 5);
}

TEST_F(EngineFlow, ClocksOfWorkersMayBeWrong) {
  FakeWorker& w = kindred(2);
  start();
  EngineTrace early = trace(0, 9'000), late = trace(1);
  early.time_s -= 86'400;
  late.time_s += 86'400;
  tell(0, early);
  tell(0, late);
  EXPECT_EQ(chat(false).status, 200);
  EXPECT_EQ(ranks(w), std::vector<std::string>{"1"});
  EXPECT_NEAR(*engine(0, 0).skew_s, -86'400, 5);
  EXPECT_NEAR(status()["workers"][0]["engines"][1]["skew_s"].get<double>(), 86'400, 5);
}

TEST_F(EngineFlow, ARestartedWorkerIsBelievedAtOnce) {
  FakeWorker& w = kindred(2);
  start();
  sequence_ = 1'000'000;
  tell(0, trace(0, 9'000));
  tell(0, trace(1));
  epoch_ = 8;
  sequence_ = 0;
  tell(0, trace(0));
  tell(0, trace(1, 9'000));
  EXPECT_EQ(chat(false).status, 200);
  EXPECT_EQ(ranks(w), std::vector<std::string>{"0"});
}

TEST_F(EngineFlow, OneDeadWorkerDoesNotBlindTheOthers) {
  FakeWorker& a = kindred(1);
  FakeWorker& b = kindred(1);
  FakeWorker& c = kindred(1);
  start();
  tell(0, trace(0));
  tell(1, trace(0, 9'000));
  tell(2, trace(0, 5));
  a.kill();
  // The request that finds it dead goes elsewhere, and those after it are chosen by what the others say.
  for (int i = 0; i < 5; ++i) EXPECT_EQ(chat(false).status, 200);
  EXPECT_EQ(b.leg_count(), 0U);
  EXPECT_EQ(c.leg_count(), 5U);
  EXPECT_EQ(status()["decisions"][0]["reason"], "pressure");
}

TEST_F(EngineFlow, WithoutTracesRequestsTakeTurns) {
  options_.engines.policy.tie_break = "rotate";
  options_.load_interval_ms = 0ms;
  FakeWorker& w = kindred(2);
  start();
  for (int i = 0; i < 4; ++i) EXPECT_EQ(chat(false).status, 200);
  const std::vector<std::string> got = ranks(w);
  EXPECT_EQ(std::ranges::count(got, "0"), 2);
  const Json seen = status();
  EXPECT_EQ(seen["decisions"][0]["reason"], "ordered");
  EXPECT_EQ(seen["decisions"][0]["fallback"], "no_trace");
  EXPECT_TRUE(has_metric("kindred_router_engine_decisions_total{reason=\"ordered\"} 4"));
}

TEST_F(EngineFlow, TokenisingIsNoWorkForAnEngine) {
  FakeWorker& w = kindred(2);
  start();
  EXPECT_EQ(call("POST", "/tokenize", R"({"model":"m","prompt":"a"})").status, 200);
  EXPECT_EQ(ranks(w), std::vector<std::string>{""});
}

TEST_F(EngineFlow, StatusAndMetricsTellAll) {
  FakeWorker& w = kindred(2);
  start();
  tell(0, trace(0, 9'000));
  tell(0, trace(1));
  EXPECT_EQ(chat(false).status, 200);
  const Json seen = status();
  const Json& policy = seen["engine_policy"];
  EXPECT_EQ(policy["name"], "pressure");
  EXPECT_EQ(policy["constants"]["kv_weight"], 4096);
  EXPECT_EQ(policy["explain"]["rank"], 1);
  EXPECT_EQ(policy["explain"]["worker"], w.url());
  EXPECT_EQ(policy["explain"]["engines"][0]["terms"]["waiting"], 9'000);
  EXPECT_EQ(policy["traces"]["subscriptions"], 1);
  const Json& engines = seen["workers"][0]["engines"];
  ASSERT_EQ(engines.size(), 2U);
  EXPECT_EQ(engines[0]["trace"], "fresh");
  EXPECT_EQ(engines[0]["waiting_prefill_tokens"], 9'000);
  EXPECT_EQ(engines[0]["score"], 9'000);
  EXPECT_EQ(engines[1]["in_flight"], 0);
  EXPECT_TRUE(has_metric("kindred_router_engine_score{engine=\"0\",worker=\"" + w.url() + "\"} 9000"));
  EXPECT_TRUE(has_metric("kindred_router_engine_trace_fresh{engine=\"1\",worker=\"" + w.url() + "\"} 1"));
  EXPECT_TRUE(has_metric("kindred_router_engine_decisions_total{reason=\"pressure\"} 1"));
}

TEST_F(EngineFlow, TracesOfOthersComeFromWhereTheOptionsSay) {
  FakeWorker& w = other(Role::kBoth, "vllm");
  publishers_.push_back(std::make_unique<TracePublisher>());
  options_.engines.traces = {w.url() + "=" + publishers_[0]->endpoint()};
  start();
  tell(0, trace(0, 9'000));
  tell(0, trace(1));
  EXPECT_EQ(chat(false).status, 200);
  EXPECT_EQ(ranks(w), std::vector<std::string>{"1"});
}

TEST_F(EngineFlow, VllmIsToldTheNameThatItsTracesUse) {
  FakeWorker& w = other(Role::kBoth, "vllm");
  w.play(hang);
  publishers_.push_back(std::make_unique<TracePublisher>());
  options_.engines.traces = {w.url() + "=" + publishers_[0]->endpoint()};
  start();
  tell(0, trace(0));
  const std::string plain = chat_body(true);
  std::vector<std::string> bodies = {plain};
  for (const char* own : {"{}", "null", R"({"a": 1})", "7"}) {
    bodies.push_back(plain.substr(0, plain.size() - 1) + fmt::format(R"(,"vllm_xargs":{}}})", own));
  }
  std::vector<ConnectionPtr> clients;
  std::vector<uint64_t> names;
  for (const std::string& body : bodies) {
    clients.push_back(open("POST", "/v1/chat/completions", body));
    ASSERT_TRUE(eventually([&] { return w.leg_count() == clients.size(); }));
    const SeenLeg leg = w.legs().back();
    EXPECT_EQ(header_of(leg, "X-Kindred-Dispatch"), "");
    Json seen = Json::parse(leg.body);
    if (seen["vllm_xargs"] == 7) {  // nothing can be added to that: the engine may refuse it
      EXPECT_EQ(leg.body, body);
      continue;
    }
    names.push_back(*parse_hex64(seen["vllm_xargs"]["kindred_dispatch"].get<std::string>()));
    EXPECT_EQ(seen["vllm_xargs"].value("a", 0), body.find(R"("a": 1)") == std::string::npos ? 0 : 1);
    EXPECT_TRUE(leg.body.starts_with(plain.substr(0, plain.size() - 1)));
  }
  ASSERT_EQ(names.size(), 4U);
  EXPECT_GT(engine(0, 0).ledger.unseen_prefill_tokens, 0);
  const int64_t unseen = engine(0, 0).ledger.unseen_requests;
  EngineTrace with = trace(0, 20);
  with.received = names;
  tell(0, with);
  EXPECT_EQ(unseen, 5);
  EXPECT_EQ(engine(0, 0).ledger.unseen_requests, 1);  // the one without a name, until it is answered
}

TEST_F(EngineFlow, WrongOptionsAreNamed) {
  add(Role::kBoth, "");
  const auto field = [&](const std::function<void(RouterOptions&)>& change) {
    RouterOptions options = options_;
    change(options);
    return loop_.call([&] {
      auto made = Router::make(loop_.executor(), options, clock_);
      return made ? std::string("accepted") : made.error().field;
    });
  };
  for (const char* entry : {"", "http://a:1", "http://a:1=http://b:2", "a=tcp://b:2"}) {
    EXPECT_EQ(field([&](RouterOptions& o) { o.engines.traces = {entry}; }), "traces") << entry;
  }
  EXPECT_EQ(field([](RouterOptions& o) { o.engines.policy.pressure.kv_high = 2; }), "kv_high");
  EXPECT_EQ(field([](RouterOptions& o) {
              o.experiment.arms.resize(2);
              o.experiment.arms[0].name = "a";
              o.experiment.arms[1].name = "b";
            }),
            "engine_policy");
}

}  // namespace
}  // namespace kindred::router::testing
