// What workers say of their load, polled by the router: used while it is fresh, unknown when it is not.

#include "base/json.h"
#include "router/testing.h"

namespace kindred::router::testing {
namespace {

std::string vllm_models(const std::string& id) {
  return R"({"object":"list","data":[{"id":")" + id + R"(","object":"model","owned_by":"vllm","max_model_len":4096}]})";
}

std::string vllm_metrics(int running, int waiting) {
  return "vllm:num_requests_running{engine=\"0\"} " + std::to_string(running) +
         "\nvllm:num_requests_waiting{engine=\"0\"} " + std::to_string(waiting) + "\n";
}

class LoadAgeFlow : public RouterTest {
 protected:
  void SetUp() override {
    options_.decode_policy = {.name = "least-loaded"};
    options_.load = fleet::LoadSource::kPolled;
    options_.load_interval_ms = 20ms;
    options_.load_max_age_ms = 1'000ms;
  }
  FakeWorker& vllm() {
    FakeWorker& worker = add(Role::kBoth, "");
    worker.set_page("/v1/models", vllm_models("m"));
    worker.set_page("/version", R"({"version":"0.11.0"})");
    return worker;
  }
  fleet::WorkerStatus worker(size_t at) { return router_->core().fleet.status()[at]; }
  bool known(size_t at) { return worker(at).load.has_value(); }
};

TEST_F(LoadAgeFlow, RequestsGoWhereTheWorkersSayThereIsRoom) {
  FakeWorker& busy = vllm();
  FakeWorker& idle = vllm();
  busy.set_page("/metrics", vllm_metrics(20, 5));
  idle.set_page("/metrics", vllm_metrics(1, 0));
  start();
  ASSERT_TRUE(eventually([&] { return known(0) && known(1); }));
  for (int i = 0; i < 6; ++i) EXPECT_EQ(chat(false).status, 200);
  EXPECT_EQ(busy.leg_count(), 0U);
  EXPECT_EQ(idle.leg_count(), 6U);
  const Json seen = Json::parse(call("GET", "/status").body)["workers"][0];
  EXPECT_EQ(seen["dialect"], "vllm");
  EXPECT_EQ(seen["version"], "0.11.0");
  EXPECT_EQ(seen["load"]["running"], 20);
  EXPECT_TRUE(has_metric("kindred_router_load_known{role=\"both\",worker=\"" + busy.url() + "\"} 1"));
}

TEST_F(LoadAgeFlow, PollsThatFailAgeOut) {
  FakeWorker& silent = vllm();
  FakeWorker& other = vllm();
  silent.set_page("/metrics", vllm_metrics(0, 0));
  other.set_page("/metrics", vllm_metrics(3, 0));
  Gate gate;
  silent.play([&](const SeenLeg& leg, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
    co_await gate.wait();
    co_await silent.answer_plain(leg, writer);
  });
  start();
  ASSERT_TRUE(eventually([&] { return known(0) && known(1); }));
  const std::string labels = "{role=\"both\",worker=\"" + silent.url() + "\"} ";
  EXPECT_TRUE(metrics().find("kindred_router_worker_waiting" + labels) != std::string::npos);
  EXPECT_FALSE(has_metric("kindred_router_worker_waiting" + labels + "nan"));
  silent.remove_page("/metrics");
  ASSERT_TRUE(eventually([&] { return !known(0); }));
  EXPECT_TRUE(Json::parse(call("GET", "/status").body)["workers"][0]["load"].is_null());
  EXPECT_TRUE(has_metric("kindred_router_load_known{role=\"both\",worker=\"" + silent.url() + "\"} 0"));
  EXPECT_TRUE(has_metric("kindred_router_worker_running" + labels + "nan"));
  EXPECT_TRUE(has_metric("kindred_router_worker_waiting" + labels + "nan"));
  // Unknown is the router's own count, not zero: after three of its own it is no better than the other.
  std::vector<ConnectionPtr> clients;
  for (int i = 0; i < 3; ++i) clients.push_back(open("POST", "/v1/chat/completions", chat_body(false)));
  ASSERT_TRUE(eventually([&] { return silent.leg_count() == 3; }));
  clients.push_back(open("POST", "/v1/chat/completions", chat_body(false)));
  clients.push_back(open("POST", "/v1/chat/completions", chat_body(false)));
  EXPECT_TRUE(eventually([&] { return silent.leg_count() + other.leg_count() == 5 && other.leg_count() >= 1; }));
  gate.open();
  for (auto& client : clients) EXPECT_EQ(parse_answer(client->read_to_end()).status, 200);
}

TEST_F(LoadAgeFlow, SglangIsAskedForItsLoadsAndOlderOnesForMetrics) {
  FakeWorker& fresh = add(Role::kBoth, "");
  FakeWorker& old = add(Role::kBoth, "");
  for (FakeWorker* worker : {&fresh, &old}) {
    worker->set_page("/v1/models", R"({"data":[{"id":"m","owned_by":"sglang","max_model_len":4096}]})");
    worker->set_page("/get_server_info", R"({"version":"0.5.4","disaggregation_mode":"null"})");
  }
  fresh.set_page("/v1/loads", R"({"loads":[{"dp_rank":0,"num_running_reqs":2,"num_waiting_reqs":1}]})");
  old.set_page("/metrics", "sglang:num_running_reqs{} 4\nsglang:num_queue_reqs{} 0\n");
  start();
  ASSERT_TRUE(eventually([&] { return known(0) && known(1); }));
  EXPECT_EQ(worker(0).load->requests(), 3);
  EXPECT_EQ(worker(1).load->requests(), 4);
}

TEST_F(LoadAgeFlow, TheLedgerOfTokensIsAlwaysOn) {
  options_.load = fleet::LoadSource::kTokens;
  FakeWorker& w = vllm();
  Gate gate;
  w.play([&](const SeenLeg& leg, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
    co_await gate.wait();
    co_await w.answer_plain(leg, writer);
  });
  start();
  auto client = open("POST", "/v1/chat/completions", chat_body(false, R"(,"max_tokens":100,"n":3)"));
  ASSERT_TRUE(eventually([&] { return in_flight() == 3; }));
  const int64_t tokens = worker(0).tokens_in_flight;
  EXPECT_GE(tokens, 300);
  EXPECT_LE(tokens, 350);  // and about a quarter of the prompt's bytes
  gate.open();
  EXPECT_EQ(parse_answer(client->read_to_end()).status, 200);
  EXPECT_TRUE(eventually([&] { return worker(0).tokens_in_flight == 0; }));
}

}  // namespace
}  // namespace kindred::router::testing
