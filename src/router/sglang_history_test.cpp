// The history of signatures between SGLang servers: what is asked, learned and decided by.

#include <fmt/format.h>

#include <numeric>

#include "base/bytes.h"
#include "base/json.h"
#include "router/testing.h"

namespace kindred::router::testing {
namespace {

// In answers of test_shape(): one layer, four experts, one a token.
std::string routed_to(uint32_t expert, size_t tokens) {
  std::string bytes;
  for (size_t t = 0; t < tokens; ++t) bytes += std::string{static_cast<char>(expert), 0, 0, 0};
  return base64_encode(bytes);
}

constexpr size_t kPromptTokens = 200;

class SglangHistory : public RouterTest {
 protected:
  void SetUp() override {
    options_.decode_policy = {.tau = 0, .load_cap = 0};
    options_.cohorts = cohort_file({0, 1}, "");
    options_.history = {.shapes = {"1x4x1"}, .sample = 1};
    p_ = &sglang(Role::kPrefill);
    d0_ = &sglang(Role::kDecode);
    d1_ = &sglang(Role::kDecode);
    answer_with([](const std::string& body) {
      return routed_to(body.find("poem") != std::string::npos ? 1 : 0, kPromptTokens);
    });
  }

  FakeWorker& sglang(Role role) {
    FakeWorker& worker = add(role, "");
    worker.set_page("/v1/models", R"({"data":[{"id":"m","owned_by":"sglang","max_model_len":4096}]})");
    worker.set_page(
        "/server_info",
        fmt::format(R"({{"version":"0.5.23","disaggregation_mode":"{}","disaggregation_bootstrap_port":8998}})",
                    to_string(role)));
    return worker;
  }

  // The prefill server tells what `experts` makes of a body, if it is asked.
  void answer_with(std::function<std::string(const std::string& body)> experts) {
    p_->play([experts = std::move(experts)](const SeenLeg& leg, net::Request&,
                                            net::ResponseWriter& writer) -> net::Task<void> {
      const Json body = Json::parse(leg.body);
      const bool asked = body.value("return_routed_experts", false);
      std::string text =
          fmt::format(R"({{"choices":[{{"index":0}}],"usage":{{"prompt_tokens":{}}}{}}})", kPromptTokens,
                      asked ? fmt::format(R"(,"sglext":{{"routed_experts":"{}"}})", experts(leg.body)) : std::string());
      co_await writer.send(200, json_type(), text);
    });
  }

  static std::string body(const std::string& topic, const std::string& end, bool stream = true) {
    std::string text;
    while (text.size() < 4'000) text += topic + " ";
    return fmt::format(R"({{"model":"m","messages":[{{"role":"user","content":"{}{}"}}],"stream":{}}})", text, end,
                       stream);
  }
  Answer ask(const std::string& topic, const std::string& end, bool stream = true) {
    return call("POST", "/v1/chat/completions", body(topic, end, stream));
  }
  Json last() { return Json::parse(call("GET", "/status?decisions=1").body)["decisions"][0]; }
  Json history() { return Json::parse(call("GET", "/status").body)["history"]; }
  bool refused(const std::string& reason, int times = 1) {
    return has_metric(fmt::format(R"(kindred_router_history_refused_total{{reason="{}"}} {})", reason, times));
  }

  FakeWorker *p_ = nullptr, *d0_ = nullptr, *d1_ = nullptr;
};

TEST_F(SglangHistory, WhatBeginsAlikeGoesToItsCohortAndTheRestByLoad) {
  start();
  const Answer first = ask("poem", "one");
  EXPECT_EQ(last()["fallback"], "no_counts");
  EXPECT_TRUE(last()["known_share"].is_null());
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(ask("poem", fmt::format("turn {}", i)).body, first.body);
    EXPECT_EQ(last()["decode_worker"], d1_->url());
    EXPECT_EQ(last()["reason"], "band");
    EXPECT_GT(last()["known_share"], 0.9);
  }
  ask("code", "one");
  EXPECT_EQ(last()["fallback"], "no_counts");
  ask("code", "two", false);
  EXPECT_EQ(last()["decode_worker"], d0_->url());
  EXPECT_EQ(history()["learned"], 2);
  EXPECT_EQ(history()["hits"], 4);
  EXPECT_EQ(history()["misses"], 2);
}

TEST_F(SglangHistory, OnlyThePrefillLegIsAskedAndTheClientSeesNothing) {
  start();
  const std::string sent = body("poem", "one");
  const Answer answer = ask("poem", "one");
  EXPECT_EQ(answer.body.find("routed_experts"), std::string::npos);
  ASSERT_EQ(p_->leg_count(), 1U);
  ASSERT_EQ(d0_->leg_count() + d1_->leg_count(), 1U);
  const std::string to_decode = (d0_->leg_count() == 1 ? d0_ : d1_)->legs()[0].body;
  EXPECT_TRUE(to_decode.starts_with(sent.substr(0, sent.size() - 1) + R"(,"bootstrap_host":"127.0.0.1")")) << to_decode;
  EXPECT_EQ(to_decode.find("routed_experts"), std::string::npos);
  const Json to_prefill = Json::parse(p_->legs()[0].body);
  EXPECT_EQ(to_prefill["return_routed_experts"], true);
  EXPECT_EQ(to_prefill["stream_options"]["include_usage"], true);
  EXPECT_EQ(to_prefill["bootstrap_room"], Json::parse(to_decode)["bootstrap_room"]);
  // What is known well is not asked about again.
  ask("poem", "two");
  EXPECT_FALSE(Json::parse(p_->legs()[1].body).contains("return_routed_experts"));
}

TEST_F(SglangHistory, AClientsOwnWishReachesBothLegsAndItsAnswerIsLeftAlone) {
  options_.history.sample = 0;
  const std::string own = R"({"choices":[],"sglext":{"routed_experts":"AAAA"}})";
  for (FakeWorker* d : {d0_, d1_}) {
    d->play([&](const SeenLeg&, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
      co_await writer.send(200, json_type(), own);
    });
  }
  start();
  std::string wish = body("poem", "one", false);
  wish.insert(1, R"("return_routed_experts":true,)");
  EXPECT_EQ(call("POST", "/v1/chat/completions", wish).body, own);
  EXPECT_EQ(Json::parse(p_->legs()[0].body)["return_routed_experts"], true);
  EXPECT_EQ(history()["asked"], 0);
}

TEST_F(SglangHistory, GarbageIsNeverRoutedBy) {
  const std::string good = routed_to(1, kPromptTokens);
  std::vector<std::string> answers = {"!" + good, routed_to(9, kPromptTokens), routed_to(1, 20), std::string()};
  size_t at = 0;
  answer_with([&](const std::string&) { return answers.at(at); });
  start();
  for (; at < answers.size(); ++at) {
    for (int i = 0; i < 2; ++i) {
      EXPECT_EQ(ask("poem", "again").status, 200);
      EXPECT_EQ(last()["fallback"], "no_counts");
    }
  }
  EXPECT_TRUE(refused("encoding", 2));
  EXPECT_TRUE(refused("expert", 2));
  EXPECT_TRUE(refused("tokens", 4));
  EXPECT_EQ(history()["prefixes"], 0);
}

TEST_F(SglangHistory, AServerThatTellsNothingIsServedAsBefore) {
  p_->play({});
  start();
  EXPECT_EQ(ask("poem", "one").status, 200);
  EXPECT_EQ(ask("poem", "two").status, 200);
  EXPECT_TRUE(refused("missing", 2));
}

TEST_F(SglangHistory, APrefillThatHangsOrFailsTeachesNothingAndEndsAsWithoutAHistory) {
  options_.retries = 0;
  p_->play(hang);
  start();
  EXPECT_EQ(ask("poem", "one").status, 200);  // its decode worker had the KV from somewhere
  EXPECT_TRUE(eventually([&] { return p_->cancelled() == 1; }));
  EXPECT_TRUE(refused("cut"));
  for (FakeWorker* d : {d0_, d1_}) d->play(hang);
  p_->play(refuse(500, "internal_error"));
  EXPECT_EQ(ask("poem", "one").status, 500);
  EXPECT_TRUE(refused("cut", 2));
  for (FakeWorker* d : {d0_, d1_}) d->play(refuse(500, "internal_error"));
  p_->play(hang);
  EXPECT_EQ(ask("poem", "one").status, 500);
  EXPECT_TRUE(eventually([&] { return p_->cancelled() == 2 && in_flight() == 0; }));
}

TEST_F(SglangHistory, FeedsTheRefitInPlaceOfPrefillReplies) {
  options_.cohorts.clear();
  options_.refit = {.on = true, .interval_ms = 20ms, .window_ms = 60'000ms, .min_requests = 8};
  start();
  for (int i = 0; i < 10; ++i) ask(i % 2 == 0 ? "poem" : "code", fmt::format("turn {}", i));
  ASSERT_TRUE(eventually([&] { return last()["similarity"].is_number() || ask("poem", "more").status != 200; }));
  ask("poem", "now");
  const std::string poems = last()["decode_worker"];
  ask("code", "now");
  EXPECT_NE(last()["decode_worker"], poems);
}

TEST_F(SglangHistory, IsOffForPoliciesThatDoNotLookAtExperts) {
  options_.decode_policy = {.name = "least-loaded"};
  options_.cohorts.clear();
  start();
  for (int i = 0; i < 2; ++i) ask("poem", "one");
  EXPECT_EQ(history()["asked"], 0);
  EXPECT_EQ(history()["misses"], 0);
}

}  // namespace
}  // namespace kindred::router::testing
