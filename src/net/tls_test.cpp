#include "net/tls.h"

#include <gtest/gtest.h>

#include <boost/asio/steady_timer.hpp>
#include <filesystem>

#include "net/http_client.h"
#include "net/http_server.h"
#include "net/testing.h"
#include "net/testing_certificates.h"

namespace kindred::net {
namespace {

using namespace std::chrono_literals;
using testing::CertificateFiles;
using testing::raw_connect;
using testing::RawConnection;
using testing::TestAuthority;
using testing::TestLoop;

TlsServerFiles files_of(const CertificateFiles& files, std::string client_ca = {}) {
  return {files.certificate, files.key, std::move(client_ca)};
}

class TlsTest : public ::testing::Test {
 protected:
  ~TlsTest() override {
    if (server_) loop_.run([this] { return server_->drain(0ms); });
    loop_.call([this] { client_.reset(); });
    loop_.stop();
  }

  void serve(const CertificateFiles& files, std::string client_ca = {}, std::chrono::milliseconds patience = 30s) {
    auto tls = TlsServer::load(files_of(files, std::move(client_ca)));
    ASSERT_TRUE(tls.ok()) << tls.error().message;
    tls_ = *tls;
    loop_.call([&] {
      ServerOptions options;
      options.tls = tls_;
      options.head_timeout_ms = patience;
      server_ = std::make_unique<HttpServer>(
          loop_.executor(), options, [this](Request& request, ResponseWriter& out) { return handle(request, out); });
      const auto port = server_->listen("127.0.0.1", 0);
      ASSERT_TRUE(port.ok());
      port_ = *port;
    });
  }

  void trust(const std::string& ca, const CertificateFiles& own = {}) {
    auto tls = TlsClient::make({ca, own.certificate, own.key});
    ASSERT_TRUE(tls.ok()) << tls.error().message;
    ClientOptions options;
    options.tls = *tls;
    loop_.call([&] { client_ = std::make_unique<HttpClient>(loop_.executor(), options); });
  }

  Task<void> handle(Request& request, ResponseWriter& out) {
    ++handled_;
    const std::string path(request.head.path());
    if (path == "/stream") {
      co_await out.start(200, {});
      for (int i = 0; i < 100; ++i) {
        const std::string piece = std::to_string(i) + ",";
        co_await out.write(piece);
      }
      co_await out.finish();
    } else if (path == "/cut") {
      co_await out.start(200, {});
      co_await out.write("half");
      out.abort();
    } else if (path == "/hang") {
      asio::steady_timer timer(loop_.executor(), 10s);
      const auto registration = request.cancel.on_cancel([&] {
        cancelled_.set_value();
        timer.cancel();
      });
      hanging_.set_value();
      co_await timer.async_wait(kNoThrow);
    } else {
      co_await out.send(200, {}, request.body);
    }
  }

  Result<std::string> exchange(const std::string& target, const std::string& body = {}, CancelToken cancel = {},
                               const std::string& host = "127.0.0.1") {
    return loop_.run([&]() -> Task<Result<std::string>> {
      RequestHead head;
      head.method = "POST";
      head.target = target;
      const std::array<std::string_view, 1> parts = {body};
      const Endpoint to{host, port_, true};
      auto response = co_await client_->send(to, std::move(head), parts, cancel);
      if (!response) co_return response.error();
      co_return co_await (*response)->read_all(64 << 20);
    });
  }

  std::promise<void> hanging_, cancelled_;
  std::atomic<int> handled_{0};
  uint16_t port_ = 0;
  TestAuthority authority_;
  std::shared_ptr<TlsServer> tls_;
  TestLoop loop_;
  std::unique_ptr<HttpServer> server_;
  std::unique_ptr<HttpClient> client_;
};

TEST_F(TlsTest, CarriesBodiesOfAnySizeBothWays) {
  serve(authority_.issue("s"));
  trust(authority_.ca());
  for (const size_t size : {0U, 1U, 1'000U, 16'384U, 16'385U, 3'000'000U}) {
    std::string body(size, 'a');
    for (size_t i = 0; i < size; ++i) body[i] = static_cast<char>('a' + i * 7 % 26);
    const auto answer = exchange("/echo", body);
    ASSERT_TRUE(answer.ok()) << answer.error().message;
    EXPECT_TRUE(*answer == body) << size;
  }
  EXPECT_EQ(loop_.call([&] { return server_->connections(); }), 1U);  // kept alive
}

TEST_F(TlsTest, StreamsAndCuts) {
  serve(authority_.issue("s"));
  trust(authority_.ca());
  std::string whole;
  for (int i = 0; i < 100; ++i) whole += std::to_string(i) + ",";
  EXPECT_EQ(*exchange("/stream"), whole);
  const auto cut = exchange("/cut");
  ASSERT_FALSE(cut.ok());
  EXPECT_EQ(cut.error().code, ErrorCode::kIo);
}

TEST_F(TlsTest, NamesAreCheckedAndNotOnlyChains) {
  serve(authority_.issue("other", "DNS:other.example"));
  trust(authority_.ca());
  for (const char* host : {"127.0.0.1", "localhost"}) {
    const auto answer = exchange("/", "", {}, host);
    ASSERT_FALSE(answer.ok());
    EXPECT_EQ(answer.error().code, ErrorCode::kUnavailable);
    EXPECT_NE(answer.error().message.find("mismatch"), std::string::npos) << answer.error().message;
  }
  EXPECT_EQ(handled_, 0);
}

TEST_F(TlsTest, NamesAndAddressesThatAreRightPass) {
  serve(authority_.issue("s"));
  trust(authority_.ca());
  EXPECT_TRUE(exchange("/", "", {}, "localhost").ok());
  EXPECT_TRUE(exchange("/").ok());
}

TEST_F(TlsTest, AStrangersAuthorityIsNotTrusted) {
  serve(authority_.issue("s"));
  const TestAuthority other;
  for (const std::string& ca : {other.ca(), std::string()}) {  // and neither is it in the system's store
    trust(ca);
    const auto answer = exchange("/");
    ASSERT_FALSE(answer.ok());
    EXPECT_NE(answer.error().message.find("certificate verify failed"), std::string::npos) << answer.error().message;
  }
  EXPECT_EQ(handled_, 0);
}

TEST_F(TlsTest, AskedForAClientCertificateOneWithoutIsTurnedAway) {
  serve(authority_.issue("s"), authority_.ca());
  trust(authority_.ca());
  EXPECT_FALSE(exchange("/").ok());
  EXPECT_EQ(handled_, 0);
  TestAuthority other;
  trust(authority_.ca(), other.issue("stranger"));
  EXPECT_FALSE(exchange("/").ok());
  EXPECT_EQ(handled_, 0);
  trust(authority_.ca(), authority_.issue("client"));
  EXPECT_TRUE(exchange("/").ok());
}

TEST_F(TlsTest, TheCertificateIsReplacedWithoutARestart) {
  TestAuthority second;
  const CertificateFiles files = authority_.issue("s"), next = second.issue("s");
  serve(files);
  trust(authority_.ca());
  EXPECT_TRUE(exchange("/").ok());
  EXPECT_FALSE(*tls_->reload_if_changed());
  const auto replace = [](const std::string& from, const std::string& to) {
    std::filesystem::copy_file(from, to, std::filesystem::copy_options::overwrite_existing);
  };
  replace(next.certificate, files.certificate);
  EXPECT_FALSE(tls_->reload_if_changed().ok());  // the key is not there yet: the old pair stays
  EXPECT_TRUE(exchange("/").ok());
  replace(next.key, files.key);
  EXPECT_TRUE(*tls_->reload_if_changed());
  EXPECT_TRUE(exchange("/").ok());  // over the connection that is open
  trust(authority_.ca());
  EXPECT_FALSE(exchange("/").ok());
  trust(second.ca());
  EXPECT_TRUE(exchange("/").ok());
}

TEST_F(TlsTest, PeersThatDoNotSpeakItAreDropped) {
  serve(authority_.issue("s"), "", 300ms);
  RawConnection plain = raw_connect(port_);
  plain.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n");
  EXPECT_TRUE(plain.wait_closed());
  RawConnection silent = raw_connect(port_);
  EXPECT_TRUE(silent.wait_closed());  // the handshake has a deadline
  RawConnection garbage = raw_connect(port_);
  garbage.send(std::string(10'000, '\x16'));
  EXPECT_TRUE(garbage.wait_closed());
  EXPECT_EQ(handled_, 0);
}

TEST_F(TlsTest, AClientThatLeavesCancelsItsRequest) {
  serve(authority_.issue("s"));
  trust(authority_.ca());
  CancelSource leave;
  auto answer = loop_.start([&]() -> Task<bool> {
    RequestHead head;
    head.method = "GET";
    head.target = "/hang";
    const Endpoint to{"127.0.0.1", port_, true};
    const auto response = co_await client_->send(to, std::move(head), {}, leave.token());
    co_return response.ok();
  });
  hanging_.get_future().wait();
  loop_.call([&] { leave.cancel(); });
  EXPECT_FALSE(answer.get());
  EXPECT_EQ(cancelled_.get_future().wait_for(2s), std::future_status::ready);
}

TEST_F(TlsTest, AServerInClearIsNoPeer) {
  testing::RawServer plain([](RawConnection& peer, int) {
    peer.read_bytes(1);
    peer.send("HTTP/1.1 400 Bad Request\r\n\r\n");
  });
  port_ = plain.port();
  trust(authority_.ca());
  const auto answer = exchange("/");
  ASSERT_FALSE(answer.ok());
  EXPECT_EQ(answer.error().code, ErrorCode::kUnavailable);
}

TEST(TlsFiles, AreCheckedAtTheStart) {
  TestAuthority authority;
  const CertificateFiles one = authority.issue("one"), two = authority.issue("two");
  EXPECT_TRUE(TlsServer::load(files_of(one)).ok());
  const auto field = [](const Result<std::shared_ptr<TlsServer>>& result) {
    return result.ok() ? std::string("ok") : result.error().field;
  };
  EXPECT_EQ(field(TlsServer::load({"/nonexistent", one.key, ""})), "tls_cert");
  EXPECT_EQ(field(TlsServer::load({one.certificate, "/nonexistent", ""})), "tls_key");
  EXPECT_EQ(field(TlsServer::load({one.certificate, two.key, ""})), "tls_key");
  EXPECT_EQ(field(TlsServer::load({one.key, one.key, ""})), "tls_cert");
  EXPECT_EQ(field(TlsServer::load({one.certificate, one.key, one.key})), "tls_client_ca");
  EXPECT_EQ(TlsClient::make({one.key, "", ""}).error().field, "upstream_ca");
  EXPECT_EQ(TlsClient::make({"", one.certificate, ""}).error().field, "upstream_key");
  EXPECT_EQ(TlsClient::make({"", one.certificate, two.key}).error().field, "upstream_key");
}

}  // namespace
}  // namespace kindred::net
