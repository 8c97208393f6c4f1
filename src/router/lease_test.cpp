// Leases are kept alive while a request waits for decode; prefill is not run where nobody can decode.

#include "base/json.h"
#include "router/testing.h"

namespace kindred::router::testing {
namespace {

TEST_F(PdFlowTest, LeasesAreRenewedWhileDecodeKeepsThemWaiting) {
  FakeWorker& p = prefill();
  FakeWorker& d = decode();
  p.set_lease_ttl(150ms);
  Gate gate;
  d.play([&](const SeenLeg& leg, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
    co_await gate.wait();
    co_await d.answer_decode(leg, writer);
  });
  start();
  auto client = open("POST", "/v1/chat/completions", chat_body(true));
  EXPECT_TRUE(eventually([&] { return p.renewed().size() >= 3; }));
  EXPECT_EQ(p.renewed().front(), "lease-1");
  gate.open();
  EXPECT_EQ(parse_answer(client->read_to_end()).body, kWholeStream);
  EXPECT_TRUE(eventually([&] { return p.released() == std::vector<std::string>{"lease-1"}; }));
  const size_t renewals = p.renewed().size();
  p.set_lease_ttl(30s);
  for (int i = 0; i < 20; ++i) EXPECT_EQ(chat(true).body, kWholeStream);
  EXPECT_EQ(p.renewed().size(), renewals);  // none after the release
}

// Whichever leg hangs is cancelled, the KV is given back, and the client is told before long.
TEST_F(PdFlowTest, ALegThatHangsIsCancelledAndItsKvReleased) {
  options_.prefill_deadline_ms = 100ms;
  options_.first_deadline_ms = 100ms;
  options_.decode_deadline_ms = 100ms;
  FakeWorker& p = prefill();
  FakeWorker& d = decode();
  start();
  d.play(hang);
  for (const bool stream : {true, false}) {
    const size_t before = p.released().size();
    const Answer answer = chat(stream);
    EXPECT_NE(answer.body.find("\"code\":\"worker_timeout\""), std::string::npos) << answer.body;
    EXPECT_EQ(answer.body.find("[DONE]"), std::string::npos);
    EXPECT_EQ(answer.status, stream ? 200 : 504);
    EXPECT_TRUE(eventually([&] { return d.cancelled() == before + 1 && p.released().size() == before + 1; }, 1s));
  }
  p.play(hang);
  EXPECT_EQ(chat(true).status, 504);
  EXPECT_TRUE(eventually([&] { return p.cancelled() == 1 && in_flight() == 0; }, 1s));
  EXPECT_EQ(d.leg_count(), 2U);
}

TEST_F(PdFlowTest, APrefillWorkerThatDiesWhileDecodeWaitsIsNoReasonToStop) {
  FakeWorker& p = prefill();
  FakeWorker& d = decode();
  p.set_lease_ttl(100ms);
  Gate gate;
  d.play([&](const SeenLeg& leg, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
    co_await gate.wait();  // it has pulled the KV already, for all the router knows
    co_await d.answer_decode(leg, writer);
  });
  start();
  auto client = open("POST", "/v1/chat/completions", chat_body(true));
  ASSERT_TRUE(eventually([&] { return !p.renewed().empty(); }));
  p.kill();
  gate.open();
  EXPECT_EQ(parse_answer(client->read_to_end()).body, kWholeStream);
  EXPECT_TRUE(eventually([&] { return has_metric("kindred_router_leases_stranded_total 1"); }, 8s));
}

TEST_F(PdFlowTest, LeasesAreReleasedTogetherWhereTheWorkerTakesThemSo) {
  constexpr size_t kRequests = 12;
  FakeWorker& p = prefill();
  decode();
  p.set_releases(4);
  start();
  std::vector<ConnectionPtr> clients;
  for (size_t i = 0; i < kRequests; ++i) clients.push_back(open("POST", "/v1/chat/completions", chat_body(true)));
  for (auto& client : clients) EXPECT_EQ(parse_answer(client->read_to_end()).body, kWholeStream);
  EXPECT_TRUE(eventually([&] { return p.released().size() == kRequests; }));
  std::vector<std::string> released = p.released();
  std::ranges::sort(released);
  EXPECT_EQ(std::ranges::unique(released).begin(), released.end());  // each once
  EXPECT_LE(p.release_calls(), kRequests);
  EXPECT_GE(p.release_calls(), kRequests / 4);
  EXPECT_TRUE(eventually([&] { return has_metric("kindred_router_leases_released_total 12"); }));
}

TEST_F(PdFlowTest, ADecodePoolWithoutRoomIsKnownBeforePrefill) {
  options_.decode_inflight = 2;
  FakeWorker& p = prefill();
  FakeWorker& d0 = decode();
  FakeWorker& d1 = decode();
  Gate gate;
  for (FakeWorker* d : {&d0, &d1}) {
    d->play([&gate, d](const SeenLeg& leg, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
      co_await gate.wait();
      co_await d->answer_decode(leg, writer);
    });
  }
  start();
  std::vector<ConnectionPtr> clients;
  for (int i = 0; i < 4; ++i) clients.push_back(open("POST", "/v1/chat/completions", chat_body(true)));
  ASSERT_TRUE(eventually([&] { return d0.leg_count() + d1.leg_count() == 4; }));
  EXPECT_EQ(d0.leg_count(), 2U);
  const Answer full = chat(true);
  EXPECT_EQ(full.status, 429);
  EXPECT_EQ(parse_json(full.body)["error"]["code"], "decode_pool_full");
  EXPECT_EQ(*full.headers.find("Retry-After"), "1");
  EXPECT_EQ(p.leg_count(), 4U);
  gate.open();
  for (auto& client : clients) EXPECT_EQ(parse_answer(client->read_to_end()).body, kWholeStream);
  EXPECT_TRUE(eventually([&] { return chat(true).status == 200; }));
}

TEST_F(PdFlowTest, RoomIsReservedDuringPrefill) {
  options_.decode_inflight = 1;
  FakeWorker& p = prefill();
  decode();
  Gate gate;
  p.play([&](const SeenLeg& leg, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
    co_await gate.wait();
    co_await p.answer_prefill(leg, writer);
  });
  start();
  auto first = open("POST", "/v1/chat/completions", chat_body(true));
  ASSERT_TRUE(eventually([&] { return p.leg_count() == 1; }));
  EXPECT_EQ(chat(true).status, 429);
  EXPECT_EQ(p.leg_count(), 1U);
  gate.open();
  EXPECT_EQ(parse_answer(first->read_to_end()).body, kWholeStream);
  EXPECT_TRUE(eventually([&] { return chat(true).status == 200; }));
}

TEST_F(PdFlowTest, AFullDecodeWorkerIsBelievedForAsLongAsItSays) {
  options_.decode_policy.name = "round-robin";
  FakeWorker& p = prefill();
  FakeWorker& d0 = decode();
  FakeWorker& d1 = decode();
  const auto full = [](const SeenLeg&, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
    net::Headers headers = json_type();
    headers.add("Retry-After", "60");
    co_await writer.send(429, std::move(headers), R"({"error":{"code":"queue_full"}})");
  };
  d0.play(full);
  start();
  for (int i = 0; i < 6; ++i) EXPECT_EQ(chat(true).body, kWholeStream);
  EXPECT_EQ(d0.leg_count(), 1U);  // asked once
  EXPECT_EQ(d1.leg_count(), 6U);
  d1.play(full);
  EXPECT_EQ(chat(false).status, 429);  // d1 says so itself
  const size_t prefills = p.leg_count();
  const Answer known = chat(false);
  EXPECT_EQ(known.status, 429);
  EXPECT_EQ(parse_json(known.body)["error"]["code"], "decode_pool_full");
  EXPECT_EQ(p.leg_count(), prefills);
}

}  // namespace
}  // namespace kindred::router::testing
