// What stands between a client's socket and the flows: listeners, and connections to workers.
#include "base/json.h"
#include "router/testing.h"

namespace kindred::router::testing {
namespace {

using net::testing::RawConnection;
using net::testing::RawServer;

class EdgeTest : public RouterTest {
 protected:
  // The same call, by way of the admin listener.
  Answer admin(const std::string& method, const std::string& path, const std::string& body = {},
               const std::string& headers = {}) {
    const uint16_t port = loop_.call([this] { return router_->admin_port().value_or(0); });
    RawConnection connection = net::testing::raw_connect(port);
    connection.send(request_text(method, path, body, headers));
    return parse_answer(connection.read_to_end());
  }
};

TEST_F(EdgeTest, AdminListenerTakesOperatorsPathsAwayFromThePublicOne) {
  options_.edge.admin_port = 0;
  options_.manage_workers = true;
  add(Role::kBoth, "");
  start();
  for (const char* path : {"/metrics", "/status"}) {
    EXPECT_EQ(call("GET", path).status, 404) << path;
    EXPECT_EQ(admin("GET", path).status, 200) << path;
  }
  const std::string worker = R"({"url":"http://127.0.0.1:9","role":"both"})";
  EXPECT_EQ(call("POST", "/workers", worker).status, 404);
  EXPECT_EQ(admin("POST", "/workers", worker).status, 201);
  for (const char* path : {"/health", "/ready", "/v1/models"}) {
    EXPECT_EQ(call("GET", path).status, 200) << path;
    EXPECT_EQ(admin("GET", path).status, 200) << path;
  }
  EXPECT_EQ(chat(false).status, 200);
  EXPECT_EQ(admin("POST", "/v1/chat/completions", chat_body(false)).status, 404);
}

TEST_F(EdgeTest, OneListenerAnswersBoth) {
  add(Role::kBoth, "");
  start();
  EXPECT_EQ(loop_.call([this] { return router_->admin_port(); }), std::nullopt);
  EXPECT_EQ(call("GET", "/metrics").status, 200);
  EXPECT_EQ(chat(false).status, 200);
}

std::string http_answer(const std::string& body, const std::string& more = {}) {
  return "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n" + more +
         "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
}

// A plain worker written byte by byte, which decides per connection what becomes of a request.
class RawWorker {
 public:
  // `kept`: requests of any kind that one connection answers before the next one makes it close.
  explicit RawWorker(int kept) : server_([this, kept](RawConnection& peer, int) { serve(peer, kept); }) {}

  std::string url() const { return server_.endpoint().url(); }
  int chats() const { return chats_; }

 private:
  void serve(RawConnection& peer, int kept) {
    for (int answered = 0;;) {
      const std::string request = peer.read_message();
      if (request.empty()) return;
      if (request.starts_with("POST")) {
        ++chats_;
        if (answered == kept) return;  // closes, with the request read and nothing said
        ++answered;
        peer.send(http_answer(R"({"text":"raw"})"));
      } else {
        peer.send(http_answer(R"({"object":"list","data":[{"id":"m","object":"model"}]})"));
      }
    }
  }

  std::atomic<int> chats_{0};
  RawServer server_;
};

TEST_F(EdgeTest, StaleConnectionIsRetriedOnceAndUnseen) {
  RawWorker worker(1);
  options_.worker.push_back(worker.url());
  start();
  EXPECT_EQ(chat(false).body, R"({"text":"raw"})");
  EXPECT_EQ(worker.chats(), 1);
  // The kept connection closes under the second request, and a new one answers it.
  EXPECT_EQ(chat(false).body, R"({"text":"raw"})");
  EXPECT_EQ(worker.chats(), 3);
  EXPECT_EQ(metrics().find("kindred_router_retries_total{"), std::string::npos);
  EXPECT_TRUE(has_metric("kindred_router_worker_up{role=\"both\",worker=\"" + worker.url() + "\"} 1"));
  EXPECT_EQ(in_flight(), 0);
}

TEST_F(EdgeTest, FreshConnectionThatClosesIsNotRetriedBehindTheClientsBack) {
  RawWorker worker(0);
  options_.worker.push_back(worker.url());
  start();
  EXPECT_EQ(chat(false).status, 503);
  EXPECT_EQ(worker.chats(), 1);
  EXPECT_EQ(in_flight(), 0);
}

TEST_F(EdgeTest, NoFreeConnectionToAWorkerIsNotItsFault) {
  options_.edge.upstream.connections_per_endpoint = 1;
  options_.edge.upstream.wait_timeout_ms = 20ms;
  FakeWorker& w = add(Role::kBoth, "");
  Gate gate;
  w.play([&](const SeenLeg& leg, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
    co_await gate.wait();
    co_await w.answer_plain(leg, writer);
  });
  start();
  auto first = open("POST", "/v1/chat/completions", chat_body(false));
  ASSERT_TRUE(eventually([&] { return w.leg_count() == 1; }));
  const Answer second = chat(false);
  EXPECT_EQ(second.status, 429);
  EXPECT_TRUE(ready());
  gate.open();
  EXPECT_EQ(parse_answer(first->read_to_end()).status, 200);
  EXPECT_EQ(w.leg_count(), 1U);
}

TEST_F(EdgeTest, LimitsOfTheListenerAreTheOptions) {
  options_.edge.server.head.header_count = 8;
  options_.edge.server.head_timeout_ms = 100ms;
  add(Role::kBoth, "");
  start();
  std::string many;
  for (int i = 0; i < 9; ++i) many += "X-" + std::to_string(i) + ": 1\r\n";
  EXPECT_EQ(call("GET", "/health", "", many).status, 431);
  RawConnection slow = net::testing::raw_connect(port_);
  slow.send("GET / HT");
  EXPECT_TRUE(slow.read_to_end().starts_with("HTTP/1.1 408 "));
}

TEST_F(EdgeTest, ConnectionsAreBounded) {
  options_.edge.server.connections = 2;
  add(Role::kBoth, "");
  start();
  RawConnection one = net::testing::raw_connect(port_), two = net::testing::raw_connect(port_);
  one.send("GET /health HTTP/1.1\r\nHost: h\r\n\r\n");
  two.send("GET /health HTTP/1.1\r\nHost: h\r\n\r\n");
  EXPECT_TRUE(one.read_message().starts_with("HTTP/1.1 200 "));
  EXPECT_TRUE(two.read_message().starts_with("HTTP/1.1 200 "));
  EXPECT_EQ(call("GET", "/health").status, 503);
}

}  // namespace
}  // namespace kindred::router::testing
