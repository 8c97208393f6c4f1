#include "net/http_server.h"

#include <gtest/gtest.h>

#include <boost/asio/steady_timer.hpp>
#include <ctime>
#include <stdexcept>

#include "net/testing.h"

namespace kindred::net {
namespace {

using namespace std::chrono_literals;
using std::chrono::steady_clock;
using testing::raw_connect;
using testing::RawConnection;
using testing::TestLoop;

std::string get(std::string_view target, std::string_view headers = "") {
  return "GET " + std::string(target) + " HTTP/1.1\r\nHost: h\r\n" + std::string(headers) + "\r\n";
}

std::string post(std::string_view target, std::string_view body) {
  return "POST " + std::string(target) + " HTTP/1.1\r\nHost: h\r\nContent-Length: " + std::to_string(body.size()) +
         "\r\n\r\n" + std::string(body);
}

class ServerTest : public ::testing::Test {
 protected:
  void TearDown() override {
    if (server_) loop_.run([this] { return server_->drain(0ms); });
    loop_.stop();
  }

  void serve(ServerOptions options = {}) {
    loop_.call([&] {
      server_ = std::make_unique<HttpServer>(
          loop_.executor(), options, [this](Request& request, ResponseWriter& out) { return handle(request, out); });
      const auto port = server_->listen("127.0.0.1", 0);
      ASSERT_TRUE(port.ok()) << port.error().message;
      port_ = *port;
    });
  }

  Task<void> handle(Request& request, ResponseWriter& out) {
    ++handled_;
    const std::string path(request.head.path());
    Headers headers;
    headers.add("X-Path", path);
    if (path == "/stream") {
      if (!co_await out.start(200, headers)) co_return;
      co_await out.write("one");
      co_await out.write("");
      co_await out.write("two");
      co_await out.finish();
    } else if (path == "/framed") {
      co_await out.start(200, headers);
      co_await out.write_framed("3;x\r\nabc\r\n0\r\n");
      co_await out.write_framed("\r\n");
      co_await out.finish_framed();
    } else if (path == "/hang") {
      co_await hang(request);
    } else if (path == "/cut") {
      co_await out.start(200, headers);
      co_await out.write("half");
      out.abort();
    } else if (path == "/throw") {
      throw std::runtime_error("a bug");
    } else if (path == "/throw-late") {
      co_await out.start(200, headers);
      throw std::runtime_error("a bug");
    } else if (path == "/silent") {
      co_return;
    } else if (path == "/disorder") {
      EXPECT_TRUE(co_await out.send(200, headers, "once"));
      EXPECT_FALSE(co_await out.send(200, headers, "twice"));
      EXPECT_FALSE(co_await out.finish());
    } else if (path == "/flood") {
      const std::string piece(64 * 1024, 'x');
      co_await out.start(200, headers);
      while (co_await out.write(piece)) {
      }
      flood_ended_.set_value();
    } else {
      EXPECT_GE(request.body.capacity(), request.body.size() + kBodyPadding);
      co_await out.send(200, headers, request.head.method + ":" + request.body);
    }
  }

  void expect_cancelled_within_a_second_of(steady_clock::time_point then) {
    auto cancelled = cancelled_.get_future();
    ASSERT_EQ(cancelled.wait_for(5s), std::future_status::ready);
    EXPECT_LT(cancelled.get() - then, 1s);
  }

  // Until the request is cancelled.
  Task<void> hang(Request& request) {
    asio::steady_timer timer(loop_.executor(), 10s);
    const auto registration = request.cancel.on_cancel([&] {
      cancelled_.set_value(steady_clock::now());
      timer.cancel();
    });
    hanging_.set_value();
    co_await timer.async_wait(kNoThrow);
  }

  // Declared first, as the frames it still holds when it goes use what is below.
  std::promise<void> hanging_;
  std::promise<void> flood_ended_;
  std::promise<steady_clock::time_point> cancelled_;
  std::atomic<int> handled_{0};
  uint16_t port_ = 0;
  TestLoop loop_;
  std::unique_ptr<HttpServer> server_;
};

TEST_F(ServerTest, KeepsAConnectionForManyRequests) {
  serve();
  RawConnection peer = raw_connect(port_);
  for (int i = 0; i < 3; ++i) {
    const std::string body = "body " + std::to_string(i);
    ASSERT_TRUE(peer.send(post("/echo", body)));
    const std::string answer = peer.read_message();
    EXPECT_TRUE(answer.starts_with("HTTP/1.1 200 OK\r\nX-Path: /echo\r\nContent-Length: 11\r\n")) << answer;
    EXPECT_TRUE(answer.ends_with("\r\n\r\nPOST:" + body)) << answer;
    EXPECT_EQ(answer.find("Connection"), std::string::npos);
  }
  peer.send(get("/last", "Connection: close\r\n"));
  EXPECT_NE(peer.read_message().find("Connection: close\r\n"), std::string::npos);
  EXPECT_TRUE(peer.wait_closed());
}

TEST_F(ServerTest, AnswersPipelinedRequestsInOrder) {
  serve();
  RawConnection peer = raw_connect(port_);
  std::string all;
  for (int i = 0; i < 50; ++i) all += post("/" + std::to_string(i), std::string(100, 'b')) + "\r\n";
  peer.send(all);
  for (int i = 0; i < 50; ++i) {
    EXPECT_NE(peer.read_message().find("X-Path: /" + std::to_string(i) + "\r\n"), std::string::npos) << i;
  }
}

TEST_F(ServerTest, KeepsWhatIsPipelinedWhileAHandlerRuns) {
  serve();
  RawConnection peer = raw_connect(port_);
  peer.send(get("/stream"));
  peer.send(get("/a"));
  std::string late;
  for (int i = 0; i < 100; ++i) late += post("/b", std::string(1000, 'x'));  // more than is taken ahead
  peer.send(late);
  EXPECT_TRUE(peer.read_until("0\r\n\r\n").ends_with("\r\n3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"));
  EXPECT_NE(peer.read_message().find("X-Path: /a\r\n"), std::string::npos);
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(peer.read_message().ends_with("POST:" + std::string(1000, 'x'))) << i;
}

TEST_F(ServerTest, ReadsAHeadByteByByte) {
  serve();
  RawConnection peer = raw_connect(port_);
  for (const char byte : post("/slow", "ab")) ASSERT_TRUE(peer.send(std::string_view(&byte, 1)));
  EXPECT_TRUE(peer.read_message().ends_with("POST:ab"));
}

TEST_F(ServerTest, DecodesChunkedRequestBodies) {
  serve();
  RawConnection peer = raw_connect(port_);
  peer.send("POST /c HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n5;x=y\r\nhello\r\n");
  peer.send("6\r\n world\r\n0\r\nTrailer: 1\r\n\r\n" + get("/next"));
  EXPECT_TRUE(peer.read_message().ends_with("POST:hello world"));
  EXPECT_NE(peer.read_message().find("X-Path: /next"), std::string::npos);
}

TEST_F(ServerTest, ReadsLargeBodies) {
  serve();
  RawConnection peer = raw_connect(port_);
  std::string body(5 * 1024 * 1024, 'a');
  for (size_t i = 0; i < body.size(); ++i) body[i] = static_cast<char>('a' + i % 23);
  std::thread sender([&] { peer.send(post("/large", body)); });
  const std::string answer = peer.read_message();
  sender.join();
  EXPECT_TRUE(answer.ends_with("POST:" + body));
}

TEST_F(ServerTest, AnswersExpectContinue) {
  serve();
  RawConnection peer = raw_connect(port_);
  peer.send("POST /e HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n");
  EXPECT_EQ(peer.read_head(), "HTTP/1.1 100 Continue\r\n\r\n");
  peer.send("ok");
  EXPECT_TRUE(peer.read_message().ends_with("POST:ok"));
  peer.send("POST /e HTTP/1.1\r\nHost: h\r\nExpect: magic\r\nContent-Length: 2\r\n\r\n");
  EXPECT_TRUE(peer.read_message().starts_with("HTTP/1.1 417 "));
}

TEST_F(ServerTest, AnswersHeadWithoutABody) {
  serve();
  RawConnection peer = raw_connect(port_);
  for (const char* path : {"/x", "/stream", "/x"}) {
    peer.send("HEAD " + std::string(path) + " HTTP/1.1\r\nHost: h\r\n\r\n");
    const std::string answer = peer.read_head();
    EXPECT_TRUE(answer.starts_with("HTTP/1.1 200 OK\r\n")) << answer;
    EXPECT_EQ(answer.find("Content-Length: 5\r\n") == std::string::npos, path == std::string_view("/stream"));
  }
  peer.send(get("/end", "Connection: close\r\n"));
  EXPECT_TRUE(peer.read_to_end().starts_with("HTTP/1.1 200 OK\r\nX-Path: /end"));
}

TEST_F(ServerTest, SpeaksHttp10) {
  serve();
  RawConnection once = raw_connect(port_);
  once.send("GET /stream HTTP/1.0\r\n\r\n");
  EXPECT_EQ(once.read_to_end(), "HTTP/1.1 200 OK\r\nX-Path: /stream\r\nConnection: close\r\n\r\nonetwo");
  RawConnection kept = raw_connect(port_);
  kept.send("GET /x HTTP/1.0\r\nConnection: keep-alive\r\n\r\n");
  EXPECT_NE(kept.read_message().find("Connection: keep-alive\r\n"), std::string::npos);
  kept.send("GET /x HTTP/1.0\r\n\r\n");
  EXPECT_TRUE(kept.read_to_end().ends_with("GET:"));
}

TEST_F(ServerTest, RelaysFramedBytesAsTheyAre) {
  serve();
  RawConnection peer = raw_connect(port_);
  peer.send(get("/framed") + get("/x"));
  EXPECT_TRUE(peer.read_until("0\r\n\r\n").ends_with("\r\n\r\n3;x\r\nabc\r\n0\r\n\r\n"));
  EXPECT_TRUE(peer.read_message().ends_with("GET:"));
}

TEST_F(ServerTest, RefusesBadRequestsAndCloses) {
  ServerOptions options;
  options.head.head_bytes = 2'000;
  options.head.header_count = 8;
  options.body_bytes = 100;
  serve(options);
  const struct {
    std::string wire;
    int status;
    std::string code;
  } cases[] = {
      {"GET / HTTP/1.1\nHost: h\n\n", 400, "bad_request"},
      {"nonsense\r\n\r\n", 400, "bad_request"},
      {post("/", "x").insert(17, "Transfer-Encoding: chunked\r\n"), 400, "bad_request"},
      {"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400, "bad_request"},
      {"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 501, "not_implemented"},
      {"CONNECT h:1 HTTP/1.1\r\nHost: h\r\n\r\n", 501, "not_implemented"},
      {"GET / HTTP/3.0\r\nHost: h\r\n\r\n", 505, "http_version"},
      {"GET /" + std::string(3'000, 'x'), 431, "head_too_large"},
      {get("/", "a: 1\r\nb: 1\r\nc: 1\r\nd: 1\r\ne: 1\r\nf: 1\r\ng: 1\r\nh: 1\r\n"), 431, "head_too_large"},
      {"POST / HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 101\r\n\r\n", 413, "body_too_large"},
      {"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n65\r\n" + std::string(101, 'x'), 413,
       "body_too_large"},
  };
  for (const auto& [wire, status, code] : cases) {
    RawConnection peer = raw_connect(port_);
    peer.send(wire);
    const std::string answer = peer.read_to_end();
    EXPECT_TRUE(answer.starts_with("HTTP/1.1 " + std::to_string(status) + " ")) << wire << "\n" << answer;
    EXPECT_NE(answer.find("Connection: close\r\n"), std::string::npos);
    EXPECT_NE(answer.find("{\"error\":{\"message\":\""), std::string::npos) << answer;
    EXPECT_TRUE(answer.ends_with("\"param\":null,\"code\":\"" + code + "\"}}")) << answer;
  }
  EXPECT_EQ(handled_, 0);
}

TEST_F(ServerTest, ARefusalSurvivesTheBodyThatIsStillSent) {
  ServerOptions options;
  options.body_bytes = 100;
  serve(options);
  RawConnection peer = raw_connect(port_);
  std::thread sender([&] { peer.send(post("/", std::string(8 * 1024 * 1024, 'x'))); });
  EXPECT_TRUE(peer.read_message().starts_with("HTTP/1.1 413 "));
  sender.join();
}

TEST_F(ServerTest, TimesOutSlowPeers) {
  ServerOptions options;
  options.idle_timeout_ms = 60ms;
  options.head_timeout_ms = 150ms;
  options.body_timeout_ms = 150ms;
  serve(options);
  RawConnection idle = raw_connect(port_);
  EXPECT_EQ(idle.read_to_end(), "");
  RawConnection head = raw_connect(port_);
  head.send("GET / HT");
  EXPECT_TRUE(head.read_to_end().starts_with("HTTP/1.1 408 "));
  RawConnection body = raw_connect(port_);
  body.send("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nab");
  EXPECT_TRUE(body.read_to_end().starts_with("HTTP/1.1 408 "));
  EXPECT_EQ(handled_, 0);
}

TEST_F(ServerTest, CancelsWhenThePeerLeaves) {
  serve();
  RawConnection peer = raw_connect(port_);
  peer.send(get("/hang"));
  hanging_.get_future().wait();
  const auto left = steady_clock::now();
  peer.close();
  expect_cancelled_within_a_second_of(left);
}

TEST_F(ServerTest, CancelsWhenThePeerResets) {
  serve();
  RawConnection peer = raw_connect(port_);
  peer.send(get("/hang"));
  hanging_.get_future().wait();
  const auto left = steady_clock::now();
  peer.reset();
  expect_cancelled_within_a_second_of(left);
}

TEST_F(ServerTest, CancelsWhenThePeerLeavesBehindPipelinedBytes) {
  serve();
  RawConnection peer = raw_connect(port_);
  peer.send(get("/hang"));
  hanging_.get_future().wait();
  // More than is taken out of the socket ahead, so that the end lies behind unread bytes, and less than
  // fills the receive window, behind which it would not arrive at all.
  peer.send(post("/next", std::string(90'000, 'x')));
  const std::clock_t cpu = std::clock();
  std::this_thread::sleep_for(300ms);
  EXPECT_LT(std::clock() - cpu, CLOCKS_PER_SEC / 10);  // unread bytes do not spin the watch
  const auto left = steady_clock::now();
  peer.shut_down_write();
  expect_cancelled_within_a_second_of(left);
}

TEST_F(ServerTest, AWriteEndsWhenThePeerTakesNothing) {
  ServerOptions options;
  options.write_timeout_ms = 150ms;
  serve(options);
  RawConnection peer = raw_connect(port_);
  peer.send(get("/flood"));
  EXPECT_EQ(flood_ended_.get_future().wait_for(4s), std::future_status::ready);
}

TEST_F(ServerTest, AWriteEndsWhenThePeerLeaves) {
  serve();
  RawConnection peer = raw_connect(port_);
  peer.send(get("/flood"));
  peer.read_bytes(100'000);
  peer.close();
  EXPECT_EQ(flood_ended_.get_future().wait_for(1s), std::future_status::ready);
}

TEST_F(ServerTest, AnAbortIsACutAndNoEnd) {
  serve();
  RawConnection peer = raw_connect(port_);
  peer.send(get("/cut"));
  EXPECT_TRUE(peer.read_to_end().ends_with("\r\n\r\n4\r\nhalf\r\n"));
}

TEST_F(ServerTest, SurvivesHandlersThatFail) {
  serve();
  for (const char* path : {"/throw", "/silent"}) {
    RawConnection peer = raw_connect(port_);
    peer.send(get(path));
    const std::string answer = peer.read_to_end();
    EXPECT_TRUE(answer.starts_with("HTTP/1.1 500 ")) << answer;
    EXPECT_TRUE(answer.ends_with("\"type\":\"server_error\",\"param\":null,\"code\":\"internal_error\"}}")) << answer;
  }
  RawConnection late = raw_connect(port_);
  late.send(get("/throw-late"));
  EXPECT_TRUE(late.read_to_end().ends_with("chunked\r\n\r\n"));
  RawConnection disorder = raw_connect(port_);
  disorder.send(get("/disorder"));
  EXPECT_TRUE(disorder.read_to_end().ends_with("\r\n\r\nonce"));
  RawConnection other = raw_connect(port_);
  other.send(get("/x"));
  EXPECT_TRUE(other.read_message().ends_with("GET:"));
}

TEST_F(ServerTest, TurnsAwayConnectionsOverTheLimit) {
  ServerOptions options;
  options.connections = 1;
  serve(options);
  RawConnection first = raw_connect(port_);
  first.send(get("/x"));
  EXPECT_TRUE(first.read_message().ends_with("GET:"));
  RawConnection second = raw_connect(port_);
  EXPECT_TRUE(second.read_to_end().starts_with("HTTP/1.1 503 "));
  first.send(get("/x"));
  EXPECT_TRUE(first.read_message().ends_with("GET:"));
}

TEST_F(ServerTest, NamesThePortThatIsInUse) {
  serve();
  loop_.call([&] {
    HttpServer other(loop_.executor(), {}, [](Request&, ResponseWriter&) -> Task<void> { co_return; });
    const auto port = other.listen("127.0.0.1", port_);
    ASSERT_FALSE(port.ok());
    EXPECT_EQ(port.error().code, ErrorCode::kIo);
    EXPECT_EQ(port.error().message,
              "port " + std::to_string(port_) + " is in use by another process (address 127.0.0.1)");
    const auto nowhere = other.listen("192.0.2.1", 0);
    ASSERT_FALSE(nowhere.ok());
    EXPECT_NE(nowhere.error().message.find("192.0.2.1"), std::string::npos);
  });
}

TEST_F(ServerTest, StopLetsTheCurrentRequestEnd) {
  serve();
  RawConnection idle = raw_connect(port_);
  idle.send(get("/x"));
  idle.read_message();
  RawConnection busy = raw_connect(port_);
  busy.send("POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\na");
  while (loop_.call([&] { return server_->connections(); }) < 2) std::this_thread::yield();
  std::this_thread::sleep_for(50ms);  // its head is read; else it would count as idle
  server_->stop();
  EXPECT_TRUE(idle.wait_closed());
  EXPECT_FALSE(raw_connect(port_).open());
  auto drained = loop_.start([&] { return server_->drain(5s); });
  busy.send("b");
  const std::string answer = busy.read_to_end();
  EXPECT_NE(answer.find("Connection: close\r\n"), std::string::npos);
  EXPECT_TRUE(answer.ends_with("POST:ab"));
  EXPECT_EQ(drained.wait_for(2s), std::future_status::ready);
}

TEST_F(ServerTest, DrainCancelsWhatIsLeft) {
  serve();
  RawConnection peer = raw_connect(port_);
  peer.send(get("/hang"));
  hanging_.get_future().wait();
  const auto from = steady_clock::now();
  loop_.run([&] { return server_->drain(50ms); });
  EXPECT_LT(steady_clock::now() - from, 1s);
  EXPECT_EQ(cancelled_.get_future().wait_for(0s), std::future_status::ready);
  EXPECT_EQ(loop_.call([&] { return server_->connections(); }), 0U);
}

}  // namespace
}  // namespace kindred::net
