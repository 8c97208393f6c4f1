// Requests to engines: pins, what was sent and not yet seen, traces good and bad, and what they change.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <set>

#include "base/bytes.h"
#include "base/json.h"
#include "fleet/engine_trace.h"
#include "net/zmq.h"
#include "router/reload.h"
#include "router/sglang_flow.h"
#include "router/testing.h"
#include "router/vllm_flow.h"
#include "router/vllm_priority.h"

namespace kindred::router::testing {
namespace {

using fleet::EngineTrace;

std::string header_of(const SeenLeg& leg, std::string_view name) {
  const std::string* found = leg.headers.find(name);
  return found == nullptr ? std::string() : *found;
}

// Where a worker's engines publish.
class TracePublisher {
 public:
  TracePublisher() : socket_(*net::ZmqSocket::bind(context_, net::ZmqKind::kPublisher, "tcp://127.0.0.1:*")) {}

  void publish(const EngineTrace& trace) { send(fleet::encode_trace(trace)); }
  void send(const std::string& payload) {
    const std::string number(8, '\0');
    (void)socket_.send(std::array<std::string_view, 3>{fleet::kTraceTopic, number, payload});
  }
  std::string endpoint() const { return socket_.endpoint(); }

 private:
  net::ZmqContext context_;
  net::ZmqSocket socket_;
};

class EngineFlow : public RouterTest {
 protected:
  void SetUp() override {
    options_.engines.on = true;
    options_.engines.policy.tie_break = "lowest-index";
    options_.engines.vllm_priority = PriorityMode::kOff;
    options_.load_interval_ms = 20ms;
  }
  // A kindred worker for whole requests, with `engines` that publish at its publisher.
  FakeWorker& kindred(uint32_t engines) {
    FakeWorker& worker = add(Role::kBoth, "f0");
    publishers_.push_back(std::make_unique<TracePublisher>());
    const Json said = {
        {"v", 1},       {"role", "both"}, {"fingerprint", "f0"},           {"layers", {0}},
        {"experts", 4}, {"top_k", 1},     {"data_parallel_size", engines}, {"traces", publishers_.back()->endpoint()}};
    worker.set_page("/v1/models", Json{{"data", {{{"id", "m"}, {"owned_by", "kindred"}, {"kindred", said}}}}}.dump());
    return worker;
  }
  FakeWorker& other(Role role, const std::string& owner) {
    FakeWorker& worker = add(role, "");
    worker.set_page("/v1/models",
                    fmt::format(R"({{"data":[{{"id":"m","owned_by":"{}","max_model_len":4096}}]}})", owner));
    worker.set_page("/version", R"({"version":"0.11.0"})");
    if (owner == "sglang") {
      const char* mode = role == Role::kPrefill ? "prefill" : role == Role::kDecode ? "decode" : "null";
      worker.set_page("/get_server_info", fmt::format(R"({{"version":"0.5.10","disaggregation_mode":"{}",)"
                                                      R"("disaggregation_bootstrap_port":8998}})",
                                                      mode));
    }
    return worker;
  }

  EngineTrace trace(uint32_t rank, uint64_t waiting_tokens = 0) {
    EngineTrace out;
    out.rank = rank;
    out.epoch = epoch_;
    out.sequence = ++sequence_;
    out.time_s = static_cast<double>(clock_.unix_seconds());
    out.waiting = waiting_tokens > 0 ? 1 : 0;
    out.waiting_prefill_tokens = waiting_tokens;
    return out;
  }
  fleet::EngineStatus engine(size_t worker, uint32_t rank) {
    return router_->core().fleet.status()[worker].engines.at(rank);
  }
  // Publishes until the router has it: a subscriber may be late to join.
  void tell(size_t worker, EngineTrace wanted) {
    ASSERT_TRUE(eventually([&] {
      wanted.sequence = ++sequence_;
      publishers_[worker]->publish(wanted);
      std::this_thread::sleep_for(2ms);
      const auto engines = router_->core().fleet.status()[worker].engines;
      return engines.size() > wanted.rank && engines[wanted.rank].trace == policy::TraceState::kFresh &&
             engines[wanted.rank].sequence == wanted.sequence;
    }));
  }
  std::vector<std::string> ranks(const FakeWorker& worker) {
    std::vector<std::string> out;
    for (const SeenLeg& leg : worker.legs()) out.push_back(header_of(leg, "X-data-parallel-rank"));
    return out;
  }
  double compensation() {
    double sum = 0;
    for (const fleet::WorkerStatus& worker : router_->core().fleet.status()) {
      for (const fleet::EngineStatus& engine : worker.engines) sum += engine.view.compensation_tokens;
    }
    return sum;
  }
  Json status() { return Json::parse(call("GET", "/status").body); }

  std::vector<std::unique_ptr<TracePublisher>> publishers_;
  uint64_t epoch_ = 7, sequence_ = 0;
};

TEST_F(EngineFlow, AKindredWorkerGetsTheRankAndTheName) {
  FakeWorker& w = kindred(2);
  start();
  tell(0, trace(0, 9'000));
  tell(0, trace(1));
  // What a client says of ranks and dispatches is nothing that counts.
  const Answer answer =
      call("POST", "/v1/chat/completions", chat_body(true), "X-data-parallel-rank: 0\r\nX-Kindred-Dispatch: 1234\r\n");
  EXPECT_EQ(answer.status, 200);
  ASSERT_EQ(w.leg_count(), 1U);
  EXPECT_EQ(header_of(w.legs()[0], "X-data-parallel-rank"), "1");
  const std::string dispatch = header_of(w.legs()[0], "X-Kindred-Dispatch");
  EXPECT_EQ(dispatch.size(), 16U);
  EXPECT_TRUE(parse_hex64(dispatch).has_value());
  EXPECT_EQ(w.legs()[0].body, chat_body(true));
  const Json seen = status();
  EXPECT_EQ(seen["decisions"][0]["rank"], 1);
  EXPECT_EQ(seen["decisions"][0]["policy"], "pressure");
  EXPECT_EQ(seen["decisions"][0]["reason"], "pressure");
  EXPECT_GT(seen["decisions"][0]["prefill_tokens"], 0);
}

TEST_F(EngineFlow, OneEngineIsNotPinned) {
  FakeWorker& w = kindred(1);
  start();
  EXPECT_EQ(chat(false).status, 200);
  EXPECT_EQ(ranks(w), std::vector<std::string>{""});
  EXPECT_EQ(header_of(w.legs()[0], "X-Kindred-Dispatch").size(), 16U);
}

TEST_F(EngineFlow, VllmIsPinnedByHeaderAsItsMetricsNameItsEngines) {
  FakeWorker& w = other(Role::kBoth, "vllm");
  w.set_page("/metrics",
             "vllm:num_requests_running{engine=\"0\"} 9\nvllm:num_requests_waiting{engine=\"0\"} 5\n"
             "vllm:num_requests_running{engine=\"1\"} 0\nvllm:num_requests_waiting{engine=\"1\"} 0\n"
             "vllm:kv_cache_usage_perc{engine=\"0\"} 0.95\n");
  start();
  ASSERT_TRUE(eventually([&] { return router_->core().fleet.status()[0].engines.size() == 2; }));
  EXPECT_EQ(chat(false).status, 200);
  EXPECT_EQ(ranks(w), std::vector<std::string>{"1"});
  EXPECT_EQ(header_of(w.legs()[0], "X-Kindred-Dispatch"), "");
  EXPECT_EQ(w.legs()[0].body, chat_body(false));
}

TEST_F(EngineFlow, SglangIsPinnedInTheBody) {
  FakeWorker& w = other(Role::kBoth, "sglang");
  w.set_page("/v1/loads", R"({"loads":[{"dp_rank":0,"num_running_reqs":1,"num_waiting_reqs":2,"num_used_tokens":10,)"
                          R"("num_total_tokens":5000,"max_total_num_tokens":9000,"token_usage":0.1},)"
                          R"({"dp_rank":1,"num_running_reqs":0,"num_waiting_reqs":0,"num_used_tokens":10,)"
                          R"("num_total_tokens":10,"max_total_num_tokens":9000,"token_usage":0.1}]})");
  start();
  ASSERT_TRUE(eventually([&] { return router_->core().fleet.status()[0].engines.size() == 2; }));
  EXPECT_EQ(engine(0, 0).view.waiting_prefill_tokens, 4990);
  EXPECT_EQ(chat(true).status, 200);
  EXPECT_EQ(ranks(w), std::vector<std::string>{""});
  const std::string body = chat_body(true);
  EXPECT_EQ(w.legs()[0].body, body.substr(0, body.size() - 1) + R"(,"routed_dp_rank":1})");
}

TEST_F(EngineFlow, ThePrefillLegIsPinnedAndTheDecodeLegIsNot) {
  FakeWorker& p = add(Role::kPrefill);
  FakeWorker& d = add(Role::kDecode);
  publishers_.push_back(std::make_unique<TracePublisher>());
  Json models = {{"id", "m"}, {"owned_by", "kindred"}};
  models["kindred"] = {
      {"v", 1},       {"role", "prefill"}, {"fingerprint", "f0"},     {"layers", {0}},
      {"experts", 4}, {"top_k", 1},        {"data_parallel_size", 3}, {"traces", publishers_[0]->endpoint()}};
  p.set_page("/v1/models", Json{{"data", {models}}}.dump());
  start();
  tell(0, trace(0, 9'000));
  tell(0, trace(1, 8'000));
  tell(0, trace(2));
  EXPECT_EQ(chat(true).body, kWholeStream);
  EXPECT_EQ(ranks(p), std::vector<std::string>{"2"});
  EXPECT_EQ(ranks(d), std::vector<std::string>{""});
  EXPECT_EQ(header_of(d.legs()[0], "X-Kindred-Dispatch"), "");
  EXPECT_EQ(status()["decisions"][0]["rank"], 2);
  EXPECT_TRUE(eventually([&] { return compensation() == 0 && engine(0, 2).view.in_flight == 0; }));
}

TEST_F(EngineFlow, BothSglangServersAreToldWhereThePromptIs) {
  FakeWorker& p = other(Role::kPrefill, "sglang");
  FakeWorker& d = other(Role::kDecode, "sglang");
  p.set_page("/v1/loads", R"([{"dp_rank":0,"num_running_reqs":9,"num_waiting_reqs":9,"num_used_tokens":0,)"
                          R"("num_total_tokens":9000},{"dp_rank":1,"num_running_reqs":0,"num_waiting_reqs":0,)"
                          R"("num_used_tokens":0,"num_total_tokens":0}])");
  start();
  ASSERT_TRUE(eventually([&] { return router_->core().fleet.status()[0].engines.size() == 2; }));
  EXPECT_EQ(chat(true).status, 200);
  ASSERT_TRUE(eventually([&] { return p.leg_count() == 1 && d.leg_count() == 1; }));
  const Json to_prefill = Json::parse(p.legs()[0].body), to_decode = Json::parse(d.legs()[0].body);
  EXPECT_EQ(to_prefill["routed_dp_rank"], 1);
  EXPECT_FALSE(to_decode.contains("routed_dp_rank"));
  EXPECT_EQ(to_decode["disagg_prefill_dp_rank"], 1);
  EXPECT_EQ(to_prefill["bootstrap_room"], to_decode["bootstrap_room"]);
  EXPECT_EQ(to_prefill["bootstrap_room"].get<uint64_t>() % 2, 1U);
}

TEST(SglangRooms, GiveTheRankAndStayInRange) {
  for (const uint64_t room : {0ULL, 1ULL, 5ULL, 1234567ULL, ~0ULL >> 1}) {
    for (uint32_t rank = 0; rank < 3; ++rank) {
      const uint64_t got = room_of_rank(room, rank, 3);
      EXPECT_EQ(got % 3, rank);
      EXPECT_LE(got, std::max<uint64_t>(room, 2));
    }
  }
}

TEST_F(EngineFlow, CompensationReturnsToZeroHoweverRequestsEnd) {
  options_.retries = 0;
  FakeWorker& w = kindred(2);
  start();
  tell(0, trace(0));
  tell(0, trace(1));
  std::vector<ConnectionPtr> held;
  w.play(hang);
  for (int i = 0; i < 4; ++i) held.push_back(open("POST", "/v1/chat/completions", chat_body(true)));
  ASSERT_TRUE(eventually([&] { return w.leg_count() == 4; }));
  EXPECT_GT(compensation(), 0);
  EXPECT_EQ(engine(0, 0).view.in_flight, 2);  // one after the other, since nothing else tells them apart
  EXPECT_EQ(engine(0, 1).view.in_flight, 2);
  w.play(refuse(500, "internal_error"));
  EXPECT_EQ(chat(false).status, 500);
  w.play(hang_up);
  EXPECT_GE(chat(false).status, 500);
  w.play({});
  ASSERT_TRUE(eventually([&] { return chat(true).status == 200; }));  // its breaker, or a check, may have to close
  held.clear();                                                       // the clients leave
  EXPECT_TRUE(eventually([&] { return compensation() == 0 && in_flight() == 0; }));
  EXPECT_EQ(engine(0, 0).view.in_flight, 0);
  EXPECT_EQ(engine(0, 1).view.in_flight, 0);
}

TEST_F(EngineFlow, ATraceThatIncludesARequestTakesItsCompensation) {
  FakeWorker& w = kindred(2);
  w.play(hang);
  start();
  tell(0, trace(0));
  tell(0, trace(1, 50'000));
  const auto client = open("POST", "/v1/chat/completions", chat_body(true));
  ASSERT_TRUE(eventually([&] { return w.leg_count() == 1; }));
  tell(0, trace(0));  // newer than the request, and without it
  EXPECT_GT(engine(0, 0).view.compensation_tokens, 0);
  EngineTrace with = trace(0, 20);
  with.received = {*parse_hex64(header_of(w.legs()[0], "X-Kindred-Dispatch"))};
  tell(0, with);
  EXPECT_EQ(engine(0, 0).view.compensation_tokens, 0);
}

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

// ------------------------------------------------------------------------------------------------ reload

class OneEngineConfig final : public ConfigSource {
 public:
  std::vector<Error> read(std::optional<std::string_view>, RouterOptions& out) override {
    out = next;
    return {};
  }
  void accept() override {}
  std::string running() const override { return "{}"; }
  RouterOptions next;
};

TEST_F(EngineFlow, AReloadChangesThePolicyAndDropsNothing) {
  options_.engines.on = false;
  FakeWorker& w = kindred(2);
  Gate gate;
  w.play([&](const SeenLeg& leg, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
    co_await gate.wait();
    co_await w.answer_plain(leg, writer);
  });
  start();
  const auto reload_with = [&](const std::function<void(EngineOptions&)>& change) {
    return loop_.call([&] {
      auto source = std::make_unique<OneEngineConfig>();
      source->next = router_->core().settings()->options;
      change(source->next.engines);
      router_->set_config_source(std::move(source));
      return router_->reload().size();
    });
  };
  std::vector<ConnectionPtr> clients;
  const auto send_one = [&] {
    clients.push_back(open("POST", "/v1/chat/completions", chat_body(false)));
    const size_t wanted = clients.size();
    ASSERT_TRUE(eventually([&] { return w.leg_count() == wanted; }));
  };
  send_one();
  ASSERT_EQ(reload_with([](EngineOptions& o) { o.on = true; }), 0U);
  tell(0, trace(0, 9'000));  // whose publisher it listens to from the next check on
  tell(0, trace(1));
  send_one();
  EXPECT_EQ(reload_with([](EngineOptions& o) { o.policy.pressure.kv_gap = 0; }), 1U);
  ASSERT_EQ(reload_with([](EngineOptions& o) { o.policy.name = "request-count"; }), 0U);
  send_one();
  ASSERT_EQ(reload_with([](EngineOptions& o) { o.on = false; }), 0U);
  send_one();
  gate.open();
  for (auto& client : clients) EXPECT_EQ(parse_answer(client->read_to_end()).status, 200);
  EXPECT_EQ(ranks(w), (std::vector<std::string>{"", "1", "0", ""}));
  EXPECT_TRUE(eventually([&] { return compensation() == 0 && in_flight() == 0; }));
}

// ------------------------------------------------------------------------------------------------ vLLM's priority

class VllmPriority : public EngineFlow {
 protected:
  void SetUp() override {
    EngineFlow::SetUp();
    options_.engines.vllm_priority = PriorityMode::kAuto;
    options_.engines.priority_ms_per_token = 1'000;
  }
  // Answers the router's question as a server with that scheduler does.
  FakeWorker& vllm(int answer) {
    FakeWorker& worker = other(Role::kBoth, "vllm");
    worker.play([answer, &worker](const SeenLeg& leg, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
      if (!is_question(leg)) {
        co_await worker.answer_plain(leg, writer);
        co_return;
      }
      const std::string said = answer == 400
                                   ? R"({"object":"error","message":"Got priority 1 but Priority scheduling is )"
                                     R"(not enabled.","type":"BadRequestError","code":400})"
                                   : R"({"choices":[]})";
      co_await writer.send(answer, json_type(), said);
    });
    return worker;
  }
  static bool is_question(const SeenLeg& leg) { return leg.path == "/v1/completions"; }
  std::string taken() { return status()["workers"][0]["priority"]; }
  static std::vector<Json> bodies(const FakeWorker& worker) {
    std::vector<Json> out;
    for (const SeenLeg& leg : worker.legs()) {
      if (!is_question(leg)) out.push_back(Json::parse(leg.body));
    }
    return out;
  }
};

TEST_F(VllmPriority, IsSentWhereTheServerTakesIt) {
  FakeWorker& w = vllm(200);
  start();
  ASSERT_TRUE(eventually([&] { return taken() == "on"; }));
  const auto before = std::chrono::system_clock::now();
  EXPECT_EQ(chat(false).status, 200);
  EXPECT_EQ(call("POST", "/v1/chat/completions", chat_body(false, R"(,"priority":null)")).status, 200);
  EXPECT_EQ(call("POST", "/v1/chat/completions", chat_body(false, R"(,"priority":-5)")).status, 200);
  const std::vector<Json> got = bodies(w);
  ASSERT_EQ(got.size(), 3U);
  const int64_t arrival = std::chrono::duration_cast<std::chrono::milliseconds>(before.time_since_epoch()).count();
  const int64_t tokens = static_cast<int64_t>(std::string(R"([{"role":"user","content":"canary-prompt"}])").size()) / 4;
  EXPECT_NEAR(static_cast<double>(got[0]["priority"].get<int64_t>() - arrival), static_cast<double>(tokens) * 1'000,
              2'000);
  EXPECT_GT(got[1]["priority"], arrival);  // null is none
  EXPECT_EQ(got[2]["priority"], -5);       // the client's own
  EXPECT_EQ(std::ranges::count_if(w.legs(), is_question), 1);
  EXPECT_TRUE(has_metric("kindred_router_worker_priority{takes=\"on\",worker=\"" + w.url() + "\"} 1"));
}

TEST_F(VllmPriority, IsNotSentWhereTheServerRefusesIt) {
  FakeWorker& w = vllm(400);
  start();
  ASSERT_TRUE(eventually([&] { return taken() == "off"; }));
  EXPECT_EQ(chat(false).status, 200);
  ASSERT_EQ(bodies(w).size(), 1U);
  EXPECT_FALSE(bodies(w)[0].contains("priority"));
}

TEST_F(VllmPriority, IsAskedAgainInTheNextLife) {
  FakeWorker& w = vllm(503);
  start();
  ASSERT_TRUE(eventually([&] { return std::ranges::count_if(w.legs(), is_question) == 1; }));
  EXPECT_EQ(taken(), "unknown");
  w.set_health(503);
  ASSERT_TRUE(eventually([&] { return router_->core().fleet.status()[0].health == fleet::Health::kDown; }));
  w.set_health(200);
  EXPECT_TRUE(eventually([&] { return std::ranges::count_if(w.legs(), is_question) == 2; }));
}

TEST_F(VllmPriority, NobodyIsAskedWhereItIsOffOrSure) {
  options_.engines.vllm_priority = PriorityMode::kOn;
  options_.engines.on = false;
  FakeWorker& w = vllm(400);
  start();
  EXPECT_EQ(chat(false).status, 200);
  ASSERT_EQ(w.leg_count(), 1U);
  EXPECT_TRUE(bodies(w)[0].contains("priority"));
}

TEST_F(VllmPriority, ThatIsNoInt64IsRefused) {
  FakeWorker& w = vllm(200);
  start();
  for (const char* number : {"9223372036854775808", "-9223372036854775809", "1000000000000000000000000"}) {
    const Answer answer =
        call("POST", "/v1/chat/completions", chat_body(false, fmt::format(R"(,"priority":{})", number)));
    EXPECT_EQ(answer.status, 400) << number;
    EXPECT_EQ(Json::parse(answer.body)["error"]["param"], "priority");
  }
  EXPECT_EQ(call("POST", "/v1/chat/completions", chat_body(false, R"(,"priority":9223372036854775807)")).status, 200);
  EXPECT_EQ(bodies(w).size(), 1U);
}

TEST(VllmPriorityNumber, GrowsWithArrivalAndLengthAndStaysInRange) {
  EXPECT_EQ(priority_at(1'000, 50, 2), 1'100);
  EXPECT_EQ(priority_at(1'000, 0, 2), 1'000);
  EXPECT_GT(priority_at(1'700'000'000'000, 1e300, 1e6), 0);
  const Json body = Json::parse(*vllm_prefill_body(R"({"model":"m","priority":null})", 77));
  EXPECT_EQ(body["priority"], 77);
}

}  // namespace
}  // namespace kindred::router::testing
