// Shapes with which two parsers can be made to disagree about where a message ends: each is refused, with
// the connection closed behind the answer, and what was smuggled behind it is never handled.
#include <gtest/gtest.h>

#include <atomic>

#include "net/http_server.h"
#include "net/testing.h"

namespace kindred::net {
namespace {

using namespace std::chrono_literals;
using testing::raw_connect;
using testing::RawConnection;
using testing::TestLoop;

class StrictHttp : public ::testing::Test {
 protected:
  void SetUp() override { serve(30s); }
  void TearDown() override {
    stop();
    loop_.stop();
  }
  void stop() {
    loop_.run([this] { return server_->drain(0ms); });
  }

  void serve(std::chrono::milliseconds patience) {
    if (server_) stop();
    loop_.call([&] {
      ServerOptions options;
      options.head.head_bytes = 4'096;
      options.head.header_count = 16;
      options.body_bytes = 1'000;
      options.body_timeout_ms = options.head_timeout_ms = patience;
      server_ = std::make_unique<HttpServer>(
          loop_.executor(), options, [this](Request& request, ResponseWriter& out) { return handle(request, out); });
      const auto port = server_->listen("127.0.0.1", 0);
      ASSERT_TRUE(port.ok()) << port.error().message;
      port_ = *port;
    });
  }
  Task<void> handle(Request& request, ResponseWriter& out) {
    ++handled_;
    co_await out.send(200, {}, request.body);
  }

  // Sends `wire` with a second request behind it, and expects a refusal and nothing else.
  void expect_refused(const std::string& wire, int status) {
    handled_ = 0;
    RawConnection peer = raw_connect(port_);
    peer.send(wire + "GET /smuggled HTTP/1.1\r\nHost: h\r\n\r\n");
    const std::string answer = peer.read_to_end();
    EXPECT_TRUE(answer.starts_with("HTTP/1.1 " + std::to_string(status) + " ")) << wire << "\n---\n" << answer;
    EXPECT_NE(answer.find("Connection: close\r\n"), std::string::npos) << wire;
    EXPECT_EQ(answer.find("HTTP/1.1 ", 1), std::string::npos) << wire << "\n---\n" << answer;
    EXPECT_TRUE(peer.wait_closed()) << wire;
    EXPECT_EQ(handled_, 0) << wire;
  }

  std::atomic<int> handled_{0};
  uint16_t port_ = 0;
  TestLoop loop_;
  std::unique_ptr<HttpServer> server_;
};

std::string post(const std::string& headers, const std::string& body = {}) {
  return "POST / HTTP/1.1\r\nHost: h\r\n" + headers + "\r\n" + body;
}
std::string chunked(const std::string& body) { return post("Transfer-Encoding: chunked\r\n", body); }

TEST_F(StrictHttp, RefusesAmbiguousLengths) {
  for (const char* headers : {"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n",
                              "Transfer-Encoding: chunked\r\nContent-Length: 4\r\n",
                              "Content-Length: 4\r\nContent-Length: 5\r\n",
                              "Content-Length: 4\r\nContent-Length: 4\r\n",
                              "Content-Length: 4, 5\r\n",
                              "Content-Length: 4, 4\r\n",
                              "Content-Length: +4\r\n",
                              "Content-Length: -4\r\n",
                              "Content-Length: 0x4\r\n",
                              "Content-Length: 4 4\r\n",
                              "Content-Length: 4;\r\n",
                              "Content-Length: \r\n",
                              "Content-Length: 1e1\r\n",
                              "Content-Length: 18446744073709551616\r\n",
                              "Content-Length : 4\r\n",
                              "Content-Length\t: 4\r\n",
                              "Transfer-Encoding : chunked\r\n",
                              "Transfer-Encoding\v: chunked\r\n",
                              "Transfer-Encoding: xchunked\r\n",
                              "Transfer-Encoding: chunked, identity\r\n",
                              "Transfer-Encoding: identity\r\n",
                              "Transfer-Encoding: gzip\r\n",
                              "Transfer-Encoding: chunked, chunked\r\n",
                              "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
                              "Transfer-Encoding: chunked\r\nTransfer-Encoding: gzip\r\n",
                              "Transfer-Encoding: \"chunked\"\r\n",
                              "Transfer-Encoding: chunked;q=1\r\n",
                              "Transfer-Encoding: chunked\v\r\n",
                              "Transfer-Encoding:\r\n",
                              "Transfer-Encoding: \tchunked,\r\nContent-Length: 4\r\n"}) {
    expect_refused(post(headers, "0\r\n\r\n"), 400);
  }
  expect_refused(post("Transfer-Encoding: gzip, chunked\r\n", "0\r\n\r\n"), 501);
  expect_refused("POST / HTTP/1.0\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400);
}

TEST_F(StrictHttp, RefusesBadLines) {
  for (const std::string& wire : std::vector<std::string>{
           "GET / HTTP/1.1\nHost: h\n\n",
           "GET / HTTP/1.1\r\nHost: h\n\r\n",
           "GET / HTTP/1.1\r\nHost: h\r\n\n",
           "GET / HTTP/1.1\r\nHost: h\r\nA: b\rC: d\r\n\r\n",
           "GET / HTTP/1.1\rHost: h\r\n\r\n",
           "GET / HTTP/1.1\r\nHost: h\r\nA: b\r\n folded\r\n\r\n",
           "GET / HTTP/1.1\r\nHost: h\r\nA: b\r\n\tfolded\r\n\r\n",
           "GET / HTTP/1.1\r\n Host: h\r\n\r\n",
           "GET / HTTP/1.1\r\nHost: h\r\nno colon\r\n\r\n",
           "GET / HTTP/1.1\r\nHost: h\r\n: empty\r\n\r\n",
           "GET / HTTP/1.1\r\nHost: h\r\nA B: c\r\n\r\n",
           "GET / HTTP/1.1\r\nHost: h\r\n" + std::string("A: b\0c\r\n", 8) + "\r\n",
           "GET / HTTP/1.1\r\nHost: h\r\n" + std::string("A\0: b\r\n", 7) + "\r\n",
           std::string("GET /\0 HTTP/1.1\r\nHost: h\r\n\r\n", 29),
           "GET / HTTP/1.1\r\nHost: h\r\nA: \x7f\r\n\r\n",
           "GET  / HTTP/1.1\r\nHost: h\r\n\r\n",
           "GET /  HTTP/1.1\r\nHost: h\r\n\r\n",
           "GET\t/ HTTP/1.1\r\nHost: h\r\n\r\n",
           "GET /\tHTTP/1.1\r\nHost: h\r\n\r\n",
           " GET / HTTP/1.1\r\nHost: h\r\n\r\n",
           "GET / x HTTP/1.1\r\nHost: h\r\n\r\n",
           "GET / HTTP/1.1 \r\nHost: h\r\n\r\n",
           "GET /\r\nHost: h\r\n\r\n",
           "GET / http/1.1\r\nHost: h\r\n\r\n",
           "GET / HTTP/1.1x\r\nHost: h\r\n\r\n",
           "G(T / HTTP/1.1\r\nHost: h\r\n\r\n",
           "GET / HTTP/1.1\r\n\r\n",
           "GET / HTTP/1.1\r\nHost: h\r\nHost: h\r\n\r\n",
           "GET / HTTP/1.1\r\nHost: a, b\r\n\r\n",
           "GET path HTTP/1.1\r\nHost: h\r\n\r\n",
       }) {
    expect_refused(wire, 400);
  }
  expect_refused("GET / HTTP/2.0\r\nHost: h\r\n\r\n", 505);
}

TEST_F(StrictHttp, RefusesBadChunks) {
  for (const std::string& body : std::vector<std::string>{
           "g\r\n",
           "+1\r\na\r\n0\r\n\r\n",
           "-1\r\na\r\n0\r\n\r\n",
           "0x1\r\na\r\n0\r\n\r\n",
           " 1\r\na\r\n0\r\n\r\n",
           "1 \r\na\r\n0\r\n\r\n",
           "1\na\r\n0\r\n\r\n",
           "1\r\na\n0\r\n\r\n",
           "1\r\nab\r\n0\r\n\r\n",
           "1\r\na0\r\n\r\n",
           "ffffffffffffffff1\r\na\r\n0\r\n\r\n",
           "10000000000000001\r\na\r\n0\r\n\r\n",
           "0000000000000000000001\r\na\r\n0\r\n\r\n",
           "1;" + std::string(2'000, 'x') + "\r\na\r\n0\r\n\r\n",
           "1;a\nb\r\na\r\n0\r\n\r\n",
           "1;a\rb\r\na\r\n0\r\n\r\n",
           "0\r\nbad trailer\r\n\r\n",
           "0\r\n folded: x\r\n\r\n",
           "0\r\na: x\n\r\n",
           "0\r\na: " + std::string(10'000, 'x') + "\r\n\r\n",
           "0\r\n\n",
           "\r\n",
       }) {
    expect_refused(chunked(body), 400);
  }
  // A size that is a number, but not one that fits: told by its size before any of it is kept.
  expect_refused(chunked("ffffffffffffffff\r\n" + std::string(2'000, 'x')), 413);
}

TEST_F(StrictHttp, BoundsHeads) {
  std::string many;
  for (int i = 0; i < 20; ++i) many += "X-" + std::to_string(i) + ": 1\r\n";
  expect_refused(post(many), 431);
  expect_refused(post("X: " + std::string(5'000, 'x') + "\r\n"), 431);
  expect_refused("GET /" + std::string(5'000, 'x') + " HTTP/1.1\r\n", 431);
}

TEST_F(StrictHttp, RefusesAnExpectationWithoutReadingTheBody) {
  handled_ = 0;
  for (const auto& [headers, status] :
       std::vector<std::pair<std::string, std::string>>{{"Expect: 100-continue\r\nContent-Length: 1001\r\n", "413"},
                                                        {"Expect: 200-ok\r\nContent-Length: 3\r\n", "417"}}) {
    RawConnection peer = raw_connect(port_);
    peer.send(post(headers));
    EXPECT_TRUE(peer.read_to_end().starts_with("HTTP/1.1 " + status + " ")) << headers;
  }
  RawConnection chunks = raw_connect(port_);
  chunks.send(post("Expect: 100-Continue\r\nTransfer-Encoding: chunked\r\n"));
  EXPECT_EQ(chunks.read_head(), "HTTP/1.1 100 Continue\r\n\r\n");
  chunks.send("3e9\r\n");
  chunks.send(std::string(1'001, 'x'));
  EXPECT_TRUE(chunks.read_message().starts_with("HTTP/1.1 413 "));
  EXPECT_EQ(handled_, 0);
}

TEST_F(StrictHttp, ASlowBodyTimesOutHoweverItIsFramed) {
  serve(400ms);
  for (const std::string& wire : {chunked("5\r\nab"), chunked("5"), post("Content-Length: 5\r\n", "ab")}) {
    RawConnection peer = raw_connect(port_);
    peer.send(wire);
    EXPECT_TRUE(peer.read_to_end().starts_with("HTTP/1.1 408 ")) << wire;
  }
}

TEST_F(StrictHttp, AHeadThatTricklesTimesOut) {
  serve(400ms);
  RawConnection peer = raw_connect(port_);
  std::atomic<bool> over{false};
  // One byte at a time would keep a timeout between reads from ever firing.
  std::thread sender([&] {
    const std::string head = "GET / HTTP/1.1\r\nHost: h\r\nX: " + std::string(2'000, 'x');
    for (size_t i = 0; i < head.size() && !over; ++i) {
      if (!peer.send(std::string_view(head).substr(i, 1))) break;
      std::this_thread::sleep_for(10ms);
    }
  });
  EXPECT_TRUE(peer.read_until("\r\n\r\n").starts_with("HTTP/1.1 408 "));
  over = true;
  sender.join();
}

}  // namespace
}  // namespace kindred::net
