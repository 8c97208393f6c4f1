// The order inside vLLM's engines, carried by `priority`.

#include "router/vllm_priority.h"
#include "router/engine_testing.h"
#include "router/vllm_flow.h"

namespace kindred::router::testing {
namespace {

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
