// An API server as pods reach it: https under an authority of its own, and a token that is renewed.

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <boost/asio/steady_timer.hpp>
#include <cstdio>
#include <fstream>
#include <mutex>

#include "base/json.h"
#include "net/http_server.h"
#include "net/testing_certificates.h"
#include "router/testing.h"

namespace kindred::router::testing {
namespace {

// One Service with one endpoint. Used on the loop's thread, but for the getters.
class SecureApi {
 public:
  SecureApi(net::testing::TestLoop& loop, net::testing::TestAuthority& authority, uint16_t endpoint_port)
      : loop_(loop),
        list_(R"({"metadata":{"resourceVersion":"7"},"items":[{"metadata":{"name":"s","resourceVersion":"5"},)"
              R"("addressType":"IPv4","ports":[{"name":"http","port":)" +
              std::to_string(endpoint_port) +
              R"(}],"endpoints":[{"addresses":["127.0.0.1"],"conditions":{"ready":true}}]}]})") {
    const net::testing::CertificateFiles files = authority.issue("api");
    loop_.call([&] {
      net::ServerOptions options;
      auto tls = net::TlsServer::load({files.certificate, files.key, ""});
      EXPECT_TRUE(tls.ok());
      if (tls) options.tls = *tls;
      server_ = std::make_unique<net::HttpServer>(
          loop_.executor(), options,
          [this](net::Request& request, net::ResponseWriter& writer) { return answer(request, writer); });
      const Result<uint16_t> port = server_->listen("127.0.0.1", 0);
      EXPECT_TRUE(port.ok());
      if (port) port_ = *port;
      return 0;
    });
  }
  ~SecureApi() {
    ending_ = true;
    loop_.run([this]() -> net::Task<void> {
      server_->stop();
      co_await server_->drain(1'000ms);
      server_.reset();
    });
  }

  std::string url() const { return "https://127.0.0.1:" + std::to_string(port_); }
  // How many requests came with this Authorization.
  size_t asked_with(const std::string& authorization) const {
    const std::lock_guard lock(mutex_);
    return static_cast<size_t>(std::ranges::count(seen_, authorization));
  }
  size_t asked() const {
    const std::lock_guard lock(mutex_);
    return seen_.size();
  }
  void end_watches() { ++rounds_; }

 private:
  net::Task<void> answer(net::Request& request, net::ResponseWriter& writer) {
    {
      const std::lock_guard lock(mutex_);
      const std::string_view* given = request.head.headers.find("Authorization");
      seen_.emplace_back(given == nullptr ? "" : *given);
    }
    const bool watch = request.head.query_value("watch").has_value();
    if (!watch) {
      co_await writer.send(200, {}, list_);
      co_return;
    }
    co_await writer.start(200, {});
    const int round = rounds_;
    net::asio::steady_timer pause(loop_.executor());
    while (!ending_ && rounds_ == round && !request.cancel.cancelled()) {
      pause.expires_after(5ms);
      co_await pause.async_wait(net::kNoThrow);
    }
    co_await writer.finish();
  }

  net::testing::TestLoop& loop_;
  const std::string list_;
  std::unique_ptr<net::HttpServer> server_;
  uint16_t port_ = 0;
  std::atomic<bool> ending_{false};
  std::atomic<int> rounds_{0};
  mutable std::mutex mutex_;
  std::vector<std::string> seen_;
};

class KubernetesTls : public RouterTest {
 protected:
  void SetUp() override {
    options_.decode_policy = {.name = "round-robin"};
    token_ = ::testing::TempDir() + "kindred_token_" + std::to_string(::getpid());
    fakes_.push_back(std::make_unique<FakeWorker>(loop_, Role::kBoth, ""));
    api_ = std::make_unique<SecureApi>(loop_, authority_, net::parse_endpoint(fakes_.back()->url())->port);
    options_.kubernetes_services = {"ai/vllm"};
    options_.kubernetes_api = api_->url();
    options_.kubernetes_token_file = token_;
    put_token("first");
  }
  void TearDown() override {
    api_.reset();
    RouterTest::TearDown();
    std::remove(token_.c_str());
  }
  // As the kubelet writes it: without a line end, or with one.
  void put_token(const std::string& token) { std::ofstream(token_) << token << "\n"; }
  size_t workers() { return Json::parse(call("GET", "/status").body)["workers"].size(); }

  net::testing::TestAuthority authority_;
  std::string token_;
  std::unique_ptr<SecureApi> api_;
};

TEST_F(KubernetesTls, EndpointsComeOverHttpsWithTheTokenThatIsInTheFileNow) {
  options_.kubernetes_ca_file = authority_.ca();
  start();
  EXPECT_EQ(workers(), 1U);
  EXPECT_EQ(chat(false).status, 200);
  ASSERT_TRUE(eventually([&] { return api_->asked_with("Bearer first") == 2; }));  // list and watch
  put_token("second");
  api_->end_watches();
  EXPECT_TRUE(eventually([&] { return api_->asked_with("Bearer second") > 0; }));
  EXPECT_EQ(api_->asked(), api_->asked_with("Bearer first") + api_->asked_with("Bearer second"));
  EXPECT_EQ(workers(), 1U);
}

TEST_F(KubernetesTls, AServerOfAnotherAuthorityGetsNoTokenAndGivesNoWorkers) {
  net::testing::TestAuthority other;
  options_.kubernetes_ca_file = other.ca();
  start(/*wait_until_ready=*/false);
  ASSERT_TRUE(eventually([&] {
    return metrics().find("kindred_router_membership_errors_total{source=\"kubernetes\"}") != std::string::npos;
  }));
  EXPECT_EQ(workers(), 0U);
  EXPECT_EQ(api_->asked(), 0U);
}

}  // namespace
}  // namespace kindred::router::testing
