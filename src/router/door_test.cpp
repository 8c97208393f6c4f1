// Admission as clients see it: before the body is read, for the whole life of a stream, in order.

#include "router/door.h"

#include "base/json.h"
#include "router/testing.h"

namespace kindred::router::testing {
namespace {

class DoorTest : public PdFlowTest {
 protected:
  // One prefill and one decode worker; decode waits for the gate of its test.
  void one_place(size_t queue) {
    options_.max_inflight = 1;
    options_.queue = queue;
    prefill();
    FakeWorker& d = decode();
    d.play([this, &d](const SeenLeg& leg, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
      co_await gate_.wait();
      co_await d.answer_decode(leg, writer);
    });
    start();
  }
  ConnectionPtr holder() {
    auto client = open("POST", "/v1/chat/completions", chat_body(true));
    client->read_until("\"one\"");
    return client;
  }
  size_t waiting() { return router_->core().gate->waiting(); }
  size_t prompts() { return fakes_[0]->leg_count(); }

  Gate gate_;
};

TEST_F(DoorTest, OverflowIsKnownBeforeTheBodyComes) {
  one_place(0);
  auto first = holder();
  auto second = net::testing::raw_connect(port_);
  second.send(
      "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\nX-Request-Id: mine\r\n"
      "Expect: 100-continue\r\n\r\n");
  const Answer refused = parse_answer(second.read_message());  // not a byte of its body was sent
  EXPECT_EQ(refused.status, 429);
  EXPECT_EQ(*refused.headers.find("Retry-After"), "1");
  EXPECT_EQ(*refused.headers.find("X-Request-Id"), "mine");
  EXPECT_EQ(*refused.headers.find("Connection"), "close");
  EXPECT_EQ(parse_json(refused.body)["error"]["code"], "router_busy");
  EXPECT_EQ(prompts(), 1U);
  gate_.open();
  first->read_to_end();
  EXPECT_TRUE(eventually([&] { return chat(true).status == 200; }));
}

TEST_F(DoorTest, WaitsInOrderOfPriorityAndIsServedAfterIt) {
  one_place(8);
  auto first = holder();
  std::vector<ConnectionPtr> clients;
  for (const char* priority : {"7", "-3", "0"}) {
    clients.push_back(open("POST", "/v1/chat/completions", chat_body(true),
                           fmt::format("X-Kindred-Priority: {}\r\nX-Request-Id: p{}\r\n", priority, priority)));
    ASSERT_TRUE(eventually([&] { return waiting() == clients.size(); }));
  }
  EXPECT_EQ(prompts(), 1U);
  EXPECT_TRUE(has_metric("kindred_router_requests_waiting 3"));
  EXPECT_TRUE(has_metric("kindred_router_requests_limit 1"));
  EXPECT_TRUE(has_metric("kindred_router_saturation 4"));
  gate_.open();
  for (auto& client : clients) EXPECT_EQ(parse_answer(client->read_to_end()).body, kWholeStream);
  const std::vector<SeenLeg> legs = fakes_[0]->legs();
  ASSERT_EQ(legs.size(), 4U);
  EXPECT_EQ(legs[1].request_id, "p-3");
  EXPECT_EQ(legs[2].request_id, "p0");
  EXPECT_EQ(legs[3].request_id, "p7");
  EXPECT_EQ(legs[3].headers.find("X-Kindred-Priority"), nullptr);
  EXPECT_TRUE(has_metric("kindred_router_queue_seconds_count 3"));
}

TEST_F(DoorTest, KeysTakeTurns) {
  options_.edge.api_keys = "many:key-of-the-many\nfew:key-of-the-few\n";
  one_place(16);
  const auto ask = [this](const std::string& key, const std::string& id) {
    return open("POST", "/v1/chat/completions", chat_body(true),
                fmt::format("x-api-key: key-of-the-{}\r\nX-Request-Id: {}\r\n", key, id));
  };
  std::vector<ConnectionPtr> clients;
  clients.push_back(ask("many", "first"));
  clients.front()->read_until("\"one\"");
  for (const char* id : {"m0", "m1", "m2", "f0"}) {
    clients.push_back(ask(id[0] == 'm' ? "many" : "few", id));
    ASSERT_TRUE(eventually([&] { return waiting() == clients.size() - 1; }));
  }
  EXPECT_EQ(call("POST", "/v1/chat/completions", chat_body(true)).status, 401);  // before it waits
  gate_.open();
  for (auto& client : clients) client->read_to_end();
  std::string order;
  for (const SeenLeg& leg : fakes_[0]->legs()) order += leg.request_id + " ";
  EXPECT_EQ(order, "first m0 f0 m1 m2 ");
}

TEST_F(DoorTest, ExpectContinueIsAnsweredOnceThereIsAPlace) {
  one_place(8);
  auto first = holder();
  const std::string body = chat_body(true);
  auto client = net::testing::raw_connect(port_);
  client.send(
      fmt::format("POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nExpect: 100-continue\r\n"
                  "Content-Length: {}\r\n\r\n",
                  body.size()));
  ASSERT_TRUE(eventually([&] { return waiting() == 1; }));
  gate_.open();
  EXPECT_EQ(client.read_head(), "HTTP/1.1 100 Continue\r\n\r\n");
  client.send(body);
  EXPECT_EQ(parse_answer(client.read_to_end()).body, kWholeStream);
}

TEST_F(DoorTest, WhoWaitsTooLongIsTold) {
  options_.queue_wait_ms = 50ms;
  one_place(8);
  auto first = holder();
  const Answer late = chat(true);
  EXPECT_EQ(late.status, 503);
  EXPECT_EQ(parse_json(late.body)["error"]["code"], "queue_timeout");
  EXPECT_NE(late.headers.find("Retry-After"), nullptr);
  EXPECT_TRUE(has_metric("kindred_router_requests_total{outcome=\"rejected\",status=\"503\"} 1"));
  EXPECT_EQ(waiting(), 0U);
}

TEST_F(DoorTest, WhoLeavesTheQueueMakesRoom) {
  one_place(1);
  auto first = holder();
  for (int i = 0; i < 5; ++i) {
    auto client = open("POST", "/v1/chat/completions", chat_body(true) + std::string(100'000, ' '));
    ASSERT_TRUE(eventually([&] { return waiting() == 1; }));
    EXPECT_EQ(chat(true).status, 429);
    if (i % 2 == 0) client->close();
    else client->reset();
    ASSERT_TRUE(eventually([&] { return waiting() == 0; }, 1s));
  }
  EXPECT_EQ(prompts(), 1U);
}

TEST_F(DoorTest, BatchMakesWayForInteractive) {
  options_.batch_headroom_percent = 0;
  one_place(8);
  for (const bool stream : {true, false}) {
    auto batch = open("POST", "/v1/chat/completions", chat_body(stream), "X-Kindred-Lane: batch\r\n");
    ASSERT_TRUE(eventually([&] { return fakes_[1]->leg_count() == (stream ? 1U : 3U); }));
    auto second = open("POST", "/v1/chat/completions", chat_body(stream), "X-Kindred-Lane: batch\r\n");
    ASSERT_TRUE(eventually([&] { return waiting() == 1; }));
    auto interactive = holder();
    const Answer told = parse_answer(batch->read_to_end());
    EXPECT_NE(told.body.find("\"code\":\"preempted\""), std::string::npos) << told.body;
    EXPECT_EQ(told.body.find("[DONE]"), std::string::npos);
    EXPECT_EQ(told.complete, !stream);
    if (!stream) {
      EXPECT_EQ(told.status, 503);
      EXPECT_NE(told.headers.find("Retry-After"), nullptr);
    }
    EXPECT_TRUE(eventually([&] { return fakes_[1]->cancelled() == (stream ? 1U : 3U); }, 1s));
    EXPECT_EQ(waiting(), 1U);  // the other batch request, behind the interactive one
    second->close();
    ASSERT_TRUE(eventually([&] { return waiting() == 0; }));
    interactive->close();
    ASSERT_TRUE(eventually([&] { return fakes_[1]->cancelled() == (stream ? 2U : 4U); }));
    ASSERT_TRUE(eventually([&] { return in_flight() == 0 && router_->core().gate->running() == 0; }));
  }
  EXPECT_TRUE(eventually([&] { return fakes_[0]->released().size() == fakes_[0]->leg_count(); }));
}

TEST_F(DoorTest, WhatIsWrongWithAClaimIsNamed) {
  one_place(0);
  for (const char* header :
       {"X-Kindred-Priority: high", "X-Kindred-Priority: 101", "X-Kindred-Priority: 1.5", "X-Kindred-Lane: fast"}) {
    const Answer answer = call("POST", "/v1/chat/completions", chat_body(true), std::string(header) + "\r\n");
    EXPECT_EQ(answer.status, 400) << header;
    const std::string name = std::string(header).substr(0, std::string(header).find(':'));
    EXPECT_EQ(parse_json(answer.body)["error"]["param"], name);
  }
  EXPECT_EQ(prompts(), 0U);
}

}  // namespace
}  // namespace kindred::router::testing
