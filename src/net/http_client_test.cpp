#include "net/http_client.h"

#include <gtest/gtest.h>

#include <boost/asio/steady_timer.hpp>

#include "net/testing.h"

namespace kindred::net {
namespace {

using namespace std::chrono_literals;
using std::chrono::steady_clock;
using testing::RawConnection;
using testing::RawServer;
using testing::TestLoop;

constexpr std::string_view kOk = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
constexpr std::string_view kChunkedHead = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";

class ClientTest : public ::testing::Test {
 protected:
  ClientTest() : client_(std::make_unique<HttpClient>(loop_.executor(), options())) {}
  ~ClientTest() override { loop_.stop(); }

  static ClientOptions options() {
    ClientOptions options;
    options.idle_per_endpoint = 2;
    return options;
  }

  static RequestHead post(std::string target = "/v1") {
    RequestHead head;
    head.method = "POST";
    head.target = std::move(target);
    head.headers.add("X-A", "1");
    return head;
  }

  // A whole exchange: the body, or the error.
  Task<Result<std::string>> exchange(Endpoint to, CancelToken cancel = {}, RequestDeadlines deadlines = {}) {
    const std::array<std::string_view, 2> body = {"hello ", "world"};
    auto response = co_await client_->send(to, post(), body, cancel, deadlines);
    if (!response) co_return response.error();
    co_return co_await (*response)->read_all(1 << 20);
  }
  Result<std::string> run(const Endpoint& to, CancelToken cancel = {}, RequestDeadlines deadlines = {}) {
    return loop_.run([&] { return exchange(to, cancel, deadlines); });
  }

  TestLoop loop_;
  std::unique_ptr<HttpClient> client_;
};

TEST_F(ClientTest, SendsOneRequestAfterTheOtherOverOneConnection) {
  std::string first;
  RawServer server([&](RawConnection& peer, int) {
    first = peer.read_message();
    peer.send(kOk);
    while (!peer.read_message().empty()) peer.send(kOk);
  });
  for (int i = 0; i < 4; ++i) {
    const auto body = run(server.endpoint());
    ASSERT_TRUE(body.ok()) << body.error().message;
    EXPECT_EQ(*body, "ok");
  }
  EXPECT_EQ(server.connections(), 1);
  EXPECT_EQ(first, "POST /v1 HTTP/1.1\r\nHost: " + server.endpoint().text() +
                       "\r\nX-A: 1\r\nContent-Length: 11\r\nConnection: keep-alive\r\n\r\nhello world");
}

TEST_F(ClientTest, ResolvesNames) {
  RawServer server([](RawConnection& peer, int) {
    peer.read_message();
    peer.send(kOk);
  });
  EXPECT_TRUE(run(Endpoint{"localhost", server.port()}).ok());
  const auto unknown = run(Endpoint{"no-such-host.invalid", 1});
  ASSERT_FALSE(unknown.ok());
  EXPECT_EQ(unknown.error().code, ErrorCode::kUnavailable);
}

TEST_F(ClientTest, SaysWhenNobodyListens) {
  uint16_t port = 0;
  {
    RawServer server([](RawConnection&, int) {});
    port = server.port();
  }
  const auto body = run(Endpoint{"127.0.0.1", port});
  ASSERT_FALSE(body.ok());
  EXPECT_EQ(body.error().code, ErrorCode::kUnavailable);
  EXPECT_NE(body.error().message.find("127.0.0.1:" + std::to_string(port)), std::string::npos);
  EXPECT_NE(body.error().message.find("refused"), std::string::npos);
}

TEST_F(ClientTest, ReplacesAPooledConnectionThatIsClosed) {
  // Closed once idle: seen before it is used. Closed upon the request: retried.
  for (const bool upon_request : {false, true}) {
    RawServer server([&](RawConnection& peer, int index) {
      peer.read_message();
      peer.send(kOk);
      if (index > 0) return static_cast<void>(peer.wait_closed());
      if (upon_request) peer.read_message();
    });
    ASSERT_TRUE(run(server.endpoint()).ok());
    if (!upon_request) std::this_thread::sleep_for(50ms);
    const auto body = run(server.endpoint());
    EXPECT_TRUE(body.ok()) << body.error().message;
    EXPECT_EQ(server.connections(), 2);
  }
}

TEST_F(ClientTest, BytesBehindAnAnswerAreNoAnswerToTheNextRequest) {
  for (const std::string stray : {"unasked\r\n\r\n", "\r\n\r\nHTTP/1.1 200 OK\r\n\r\n", "unasked\n", "unasked"}) {
    RawServer server([&](RawConnection& peer, int index) {
      peer.read_message();
      peer.send(kOk);
      if (index > 0) return static_cast<void>(peer.wait_closed());
      // For the client it is as if they had come first; it looks at an idle connection only after a while.
      peer.read_message();
      peer.send(stray);
    });
    ASSERT_TRUE(run(server.endpoint()).ok());
    const auto body = run(server.endpoint());
    ASSERT_TRUE(body.ok()) << body.error().message;
    EXPECT_EQ(*body, "ok");
    EXPECT_EQ(server.connections(), 2);
  }
}

TEST_F(ClientTest, RetriesOnceAndOnlyAReusedConnection) {
  RawServer server([](RawConnection& peer, int index) {
    peer.read_message();
    if (index == 0) peer.send(kOk);
    peer.read_message();
  });
  ASSERT_TRUE(run(server.endpoint()).ok());
  RawServer closing([](RawConnection& peer, int) { peer.read_message(); });
  const auto fresh = run(closing.endpoint());
  ASSERT_FALSE(fresh.ok());
  EXPECT_EQ(fresh.error().code, ErrorCode::kUnavailable);
  EXPECT_EQ(closing.connections(), 1);
}

TEST_F(ClientTest, DoesNotRetryOnceTheAnswerHasBegun) {
  RawServer server([](RawConnection& peer, int) {
    peer.read_message();
    peer.send(kOk);
    peer.read_message();
    peer.send("HTTP/1.1 2");
  });
  ASSERT_TRUE(run(server.endpoint()).ok());
  const auto body = run(server.endpoint());
  ASSERT_FALSE(body.ok());
  EXPECT_EQ(body.error().code, ErrorCode::kUnavailable);
  EXPECT_EQ(server.connections(), 1);
}

TEST_F(ClientTest, DoesNotPoolWhatCannotBeReused) {
  const std::string answers[] = {
      "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok",
      "HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
      "HTTP/1.1 200 OK\r\n\r\nok",
      std::string(kOk) + "unasked",
  };
  for (const std::string& answer : answers) {
    RawServer server([&](RawConnection& peer, int) {
      peer.read_message();
      peer.send(answer);
      if (answer.find("Length") != std::string::npos) peer.wait_closed();
    });
    for (int i = 0; i < 2; ++i) {
      const auto body = run(server.endpoint());
      ASSERT_TRUE(body.ok()) << body.error().message;
      EXPECT_EQ(*body, "ok");
    }
    EXPECT_EQ(server.connections(), 2) << answer;
  }
}

TEST_F(ClientTest, ReadsInterimResponsesAndDecodesChunks) {
  RawServer server([](RawConnection& peer, int) {
    while (!peer.read_message().empty()) {
      peer.send("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n");
      peer.send(std::string(kChunkedHead) + "5;x\r\nhel");
      peer.send("lo\r\n1\r\n!\r\n0\r\nT: 1\r\n\r\n");
    }
  });
  for (int i = 0; i < 2; ++i) {
    const auto body = run(server.endpoint());
    ASSERT_TRUE(body.ok()) << body.error().message;
    EXPECT_EQ(*body, "hello!");
  }
  EXPECT_EQ(server.connections(), 1);
}

TEST_F(ClientTest, ACutBodyIsAnError) {
  const std::string chunked(kChunkedHead);
  for (const std::string& answer :
       {std::string("HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok"), chunked, chunked + "5\r\nhel",
        chunked + "5\r\nhello\r\n", chunked + "5\r\nhello\r\n0\r\n"}) {
    RawServer server([&](RawConnection& peer, int) {
      peer.read_message();
      peer.send(answer);
    });
    const auto body = run(server.endpoint());
    ASSERT_FALSE(body.ok()) << answer;
    EXPECT_EQ(body.error().code, ErrorCode::kIo) << answer;
  }
  RawServer resetting([&](RawConnection& peer, int) {
    peer.read_message();
    peer.send("HTTP/1.1 200 OK\r\n\r\nok");
    std::this_thread::sleep_for(50ms);
    peer.reset();
  });
  EXPECT_FALSE(run(resetting.endpoint()).ok());
}

TEST_F(ClientTest, RefusesMalformedResponses) {
  for (const std::string& answer :
       {std::string("SSH-2.0\r\n\r\n"), std::string("HTTP/1.1 200 OK\nX: 1\n\n"),
        std::string("HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n"),
        std::string("HTTP/1.1 101 Switching\r\n\r\n"), "HTTP/1.1 200 OK\r\nX: " + std::string(70'000, 'x'),
        std::string(kChunkedHead) + "xyz\r\n"}) {
    RawServer server([&](RawConnection& peer, int) {
      peer.read_message();
      peer.send(answer);
      peer.wait_closed();
    });
    const auto body = run(server.endpoint());
    ASSERT_FALSE(body.ok()) << answer;
    EXPECT_EQ(body.error().code, ErrorCode::kCorrupt) << body.error().message;
  }
}

TEST_F(ClientTest, TimesOut) {
  RawServer server([](RawConnection& peer, int index) {
    peer.read_message();
    if (index == 1) peer.send("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\npart");
    EXPECT_TRUE(peer.wait_closed());
  });
  for (int i = 0; i < 2; ++i) {
    const auto from = steady_clock::now();
    const auto body = run(server.endpoint(), {}, RequestDeadlines{100ms, 100ms});
    ASSERT_FALSE(body.ok());
    EXPECT_EQ(body.error().code, ErrorCode::kTimeout) << body.error().message;
    EXPECT_GE(steady_clock::now() - from, 100ms);
    EXPECT_LT(steady_clock::now() - from, 1s);
  }
}

TEST_F(ClientTest, CancelClosesAtOnce) {
  // Before the head, then inside the body.
  for (const bool in_body : {false, true}) {
    std::promise<void> reached;
    std::promise<steady_clock::time_point> closed;
    RawServer server([&](RawConnection& peer, int) {
      peer.read_message();
      if (in_body) peer.send(std::string(kChunkedHead) + "2\r\nab\r\n");
      reached.set_value();
      EXPECT_TRUE(peer.wait_closed());
      closed.set_value(steady_clock::now());
    });
    CancelSource source;
    auto result = loop_.start([&] { return exchange(server.endpoint(), source.token()); });
    reached.get_future().wait();
    std::this_thread::sleep_for(20ms);
    const auto from = steady_clock::now();
    loop_.call([&] { source.cancel(); });
    const auto body = result.get();
    ASSERT_FALSE(body.ok());
    EXPECT_EQ(body.error().code, ErrorCode::kCancelled) << body.error().message;
    EXPECT_LT(closed.get_future().get() - from, 1s);
    const auto again = run(server.endpoint(), source.token());
    EXPECT_EQ(again.error().code, ErrorCode::kCancelled);
    EXPECT_EQ(server.connections(), 1);
  }
}

TEST_F(ClientTest, DestroyingAResponseClosesItsConnection) {
  std::promise<bool> closed;
  RawServer server([&](RawConnection& peer, int) {
    peer.read_message();
    peer.send(std::string(kChunkedHead) + "2\r\nab\r\n");
    closed.set_value(peer.wait_closed(1s));
  });
  const auto drop = [&]() -> Task<std::string> {
    const Endpoint to = server.endpoint();
    auto response = co_await client_->send(to, post(), {}, {});
    if (!response) co_return response.error().message;
    auto piece = co_await (*response)->read_some();
    co_return std::string(*piece);
  };
  EXPECT_EQ(loop_.run(drop), "ab");
  EXPECT_TRUE(closed.get_future().get());
}

TEST_F(ClientTest, AResponseOutlivesItsClient) {
  std::promise<void> go;
  std::promise<bool> closed;
  RawServer server([&](RawConnection& peer, int) {
    peer.read_message();
    peer.send("HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nab");
    go.get_future().wait();
    peer.send("cd");
    closed.set_value(peer.wait_closed(1s));
  });
  const auto outlive = [&]() -> Task<Result<std::string>> {
    const Endpoint to = server.endpoint();
    auto response = co_await client_->send(to, post(), {}, {});
    if (!response) co_return response.error();
    client_.reset();
    go.set_value();
    co_return co_await (*response)->read_all(100);
  };
  EXPECT_EQ(*loop_.run(outlive), "abcd");
  EXPECT_TRUE(closed.get_future().get());
}

TEST_F(ClientTest, ClosesIdleConnectionsInTime) {
  ClientOptions options;
  options.idle_timeout_ms = 80ms;
  loop_.call([&] { client_ = std::make_unique<HttpClient>(loop_.executor(), options); });
  std::promise<bool> closed;
  RawServer server([&](RawConnection& peer, int) {
    peer.read_message();
    peer.send(kOk);
    closed.set_value(peer.wait_closed(2s));
  });
  ASSERT_TRUE(run(server.endpoint()).ok());
  EXPECT_TRUE(closed.get_future().get());
}

TEST_F(ClientTest, RelaysChunksVerbatim) {
  const std::string body = "5;a=b\r\nhello\r\n00001\r\n!\r\nA\r\n0\r\n\r\n12345\r\n0;z\r\nTrailer: 1\r\n\r\n";
  RawServer server([&](RawConnection& peer, int) {
    while (!peer.read_message().empty()) {
      peer.send(kChunkedHead);
      for (const char byte : body) peer.send(std::string_view(&byte, 1));
    }
  });
  const auto relay = [&]() -> Task<std::string> {
    const Endpoint to = server.endpoint();
    auto response = co_await client_->send(to, post(), {}, {});
    if (!response) co_return response.error().message;
    std::string wire;
    bool end = false;
    while (!end) {
      auto framed = co_await (*response)->read_framed();
      if (!framed) co_return framed.error().message;
      wire += framed->wire;
      end = framed->end;
      const bool border = wire.ends_with("hello\r\n") || wire.ends_with("!\r\n") || wire.ends_with("12345\r\n");
      EXPECT_EQ(framed->at_chunk_border, border) << wire;
    }
    co_return wire;
  };
  EXPECT_EQ(loop_.run(relay), body);
  EXPECT_EQ(loop_.run(relay), body);
  EXPECT_EQ(server.connections(), 1);
}

TEST_F(ClientTest, ReadsAnEarlyAnswerToALargeRequest) {
  RawServer server([](RawConnection& peer, int) {
    peer.read_head();
    peer.send("HTTP/1.1 413 Content Too Large\r\nContent-Length: 3\r\n\r\nbig");
    peer.shut_down_write();
    peer.wait_closed();
  });
  const std::string large(16 << 20, 'x');
  const auto send = [&]() -> Task<int> {
    const std::array<std::string_view, 1> body = {large};
    const Endpoint to = server.endpoint();
    auto response = co_await client_->send(to, post(), body, {});
    co_return response ? (*response)->head().status : 0;
  };
  EXPECT_EQ(loop_.run(send), 413);
}

TEST_F(ClientTest, AnAnswerThatIsHereIsTakenAtOnceButNotPastTheLimit) {
  RawServer server([](RawConnection& peer, int) {
    while (!peer.read_message().empty()) peer.send(kOk);
  });
  const auto take = [&](size_t limit_bytes) {
    return loop_.run([&, limit_bytes]() -> Task<Result<std::string>> {
      const std::array<std::string_view, 1> body = {"hello"};
      const Endpoint to = server.endpoint();
      auto response = co_await client_->send(to, post(), body, {});
      if (!response) co_return response.error();
      if (std::optional<std::string> all = (*response)->all_now(limit_bytes)) co_return *std::move(all);
      co_return co_await (*response)->read_all(limit_bytes);
    });
  };
  EXPECT_EQ(*take(2), "ok");
  const auto long_one = take(1);
  ASSERT_FALSE(long_one.ok());
  EXPECT_EQ(long_one.error().code, ErrorCode::kTooLarge);
}

TEST_F(ClientTest, GetKeepsItsDeadlineAndWantsStatus200) {
  RawServer server([](RawConnection& peer, int) {
    for (;;) {
      const std::string head = peer.read_head();
      if (head.empty()) return;
      if (head.starts_with("GET /ok ")) peer.send(kOk);
      if (head.starts_with("GET /missing ")) peer.send("HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n");
      if (head.starts_with("GET /busy ")) peer.send("HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n");
      if (head.starts_with("GET /drip ")) {
        peer.send("HTTP/1.1 200 OK\r\nContent-Length: 90\r\n\r\n");
        while (peer.send("x")) std::this_thread::sleep_for(20ms);
      }
    }
  });
  const auto get = [&](std::string target) {
    return loop_.run([&]() -> Task<Result<std::string>> {
      const Endpoint to = server.endpoint();
      co_return co_await client_->get(to, target, 100, 150ms);
    });
  };
  EXPECT_EQ(*get("/ok"), "ok");
  EXPECT_EQ(get("/missing").error().code, ErrorCode::kNotFound);
  EXPECT_EQ(get("/busy").error().code, ErrorCode::kUnavailable);
  EXPECT_EQ(server.connections(), 1);
  EXPECT_EQ(get("/drip").error().code, ErrorCode::kTimeout);
}

}  // namespace
}  // namespace kindred::net
