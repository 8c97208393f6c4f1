// A client that leaves, at any time: the worker's connection closes within a second, and load and permit
// are given back exactly once.

#include "router/testing.h"

namespace kindred::router::testing {
namespace {

net::Task<void> stream_for_ever(const SeenLeg&, net::Request& request, net::ResponseWriter& writer) {
  co_await writer.start(200, events_type());
  for (int i = 0; i < 2000 && !request.cancel.cancelled(); ++i) {
    co_await writer.write("data: {\"choices\":[{\"delta\":{\"content\":\"x\"}}]}\n\n");
    co_await pause_for(5ms);
  }
}

// The head of an answer in one piece, and then nothing.
net::Task<void> half_an_answer(const SeenLeg&, net::Request& request, net::ResponseWriter& writer) {
  co_await writer.start(200, json_type());
  co_await writer.write("{\"half\":");
  for (int i = 0; i < 2000 && !request.cancel.cancelled(); ++i) co_await pause_for(5ms);
}

struct LeaveCase {
  const char* when;
  bool pd;
  Script prefill, worker;  // `worker`: the decode worker, or the one that does it all
  bool stream;
  const char* seen;  // by the client before it leaves; empty: the busy worker has its leg
  bool reset;        // how it leaves
};

class ClientLeavesTest : public PdFlowTest {};

TEST_F(ClientLeavesTest, AtAnyTimeEverythingComesBackOnceWithinASecond) {
  const std::vector<LeaveCase> cases = {
      {"plain, before the first byte", false, nullptr, hang, true, "", false},
      {"plain, before the first byte, by a reset", false, nullptr, hang, true, "", true},
      {"plain, not streaming", false, nullptr, hang, false, "", false},
      {"plain, not streaming, half of it there", false, nullptr, half_an_answer, false, "", false},
      {"plain, mid-stream", false, nullptr, stream_for_ever, true, "\"x\"", false},
      {"plain, mid-stream, by a reset", false, nullptr, stream_for_ever, true, "\"x\"", true},
      {"during a long prefill", true, hang, nullptr, true, "", false},
      {"during a long prefill, not streaming", true, hang, nullptr, false, "", true},
      {"between prefill and decode", true, nullptr, hang, true, "\"one\"", false},
      {"decode, not streaming", true, nullptr, hang, false, "", false},
      {"decode, mid-stream", true, nullptr, stream_for_ever, true, "\"x\"", false},
  };
  options_.queue = 0;
  options_.max_inflight = 1;  // a permit that is lost or given back twice shows
  FakeWorker& p = prefill();
  FakeWorker& d = decode();
  FakeWorker& w = add(Role::kBoth, "");
  w.model = "plain";
  start();
  for (const LeaveCase& c : cases) {
    p.play(c.prefill);
    d.play(c.worker);
    w.play(c.worker);
    FakeWorker& busy = !c.pd ? w : c.prefill ? p : d;
    const size_t legs = busy.leg_count(), cancelled = busy.cancelled(), released = p.released().size();
    std::string body = chat_body(c.stream);
    if (!c.pd) body.replace(body.find("\"m\""), 3, "\"plain\"");
    auto client = open("POST", "/v1/chat/completions", body);
    if (*c.seen != '\0') client->read_until(c.seen);
    ASSERT_TRUE(eventually([&] { return busy.leg_count() == legs + 1; })) << c.when;
    EXPECT_EQ(in_flight(), 1) << c.when;
    EXPECT_EQ(chat(false).status, 429) << c.when;
    if (c.reset) client->reset();
    else client->close();
    EXPECT_TRUE(eventually([&] { return busy.cancelled() == cancelled + 1 && in_flight() == 0; }, 1s)) << c.when;
    if (c.pd && !c.prefill) {
      EXPECT_TRUE(eventually([&] { return p.released().size() == released + 1; }, 1s)) << c.when;
    }
    p.play(nullptr);
    d.play(hang);
    ASSERT_TRUE(eventually([&] { return has_metric("kindred_router_requests_in_flight 0"); }, 1s)) << c.when;
    // Exactly one fits again.
    const size_t gone = d.cancelled(), freed = p.released().size();
    auto next = open("POST", "/v1/chat/completions", chat_body(true));
    next->read_until("\"one\"");
    EXPECT_EQ(chat(false).status, 429) << c.when;
    next->close();
    ASSERT_TRUE(eventually([&] {
      return has_metric("kindred_router_requests_in_flight 0") && in_flight() == 0 && d.cancelled() == gone + 1 &&
             p.released().size() == freed + 1;
    })) << c.when;
  }
  for (const auto& worker : router_->core().fleet.status()) EXPECT_EQ(worker.health, fleet::Health::kUp);
}

}  // namespace
}  // namespace kindred::router::testing
