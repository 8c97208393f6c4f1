// Requests to engines: pins, and what was sent and not yet seen.

#include "base/bytes.h"
#include "router/engine_testing.h"
#include "router/reload.h"
#include "router/sglang_flow.h"

namespace kindred::router::testing {
namespace {

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

TEST_F(EngineFlow, OlderSglangServersCallTheRankOtherwise) {
  FakeWorker& w = other(Role::kBoth, "sglang");
  w.set_page("/get_server_info", R"({"version":"0.5.9","disaggregation_mode":"null"})");
  w.set_page("/v1/loads", R"({"loads":[{"dp_rank":0,"num_running_reqs":9,"num_waiting_reqs":9,"num_used_tokens":0,)"
                          R"("num_total_tokens":9000},{"dp_rank":1,"num_running_reqs":0,"num_waiting_reqs":0,)"
                          R"("num_used_tokens":0,"num_total_tokens":0}]})");
  start();
  ASSERT_TRUE(eventually([&] { return router_->core().fleet.status()[0].engines.size() == 2; }));
  EXPECT_EQ(chat(true).status, 200);
  const Json body = Json::parse(w.legs()[0].body);
  EXPECT_EQ(body["data_parallel_rank"], 1);
  EXPECT_FALSE(body.contains("routed_dp_rank"));
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

}  // namespace
}  // namespace kindred::router::testing
