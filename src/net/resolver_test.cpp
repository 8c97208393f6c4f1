// Names that come to mean other addresses while connections to the old ones are kept.

#include "net/resolver.h"

#include <gtest/gtest.h>

#include "net/http_client.h"
#include "net/testing.h"

namespace kindred::net {
namespace {

using asio::ip::tcp;
using namespace std::chrono_literals;

// Set from the loop's thread.
class FixedResolver final : public Resolver {
 public:
  Task<Result<std::vector<tcp::endpoint>>> resolve(Endpoint, std::chrono::steady_clock::time_point,
                                                   CancelToken) override {
    ++asked;
    if (addresses.empty()) co_return Error{ErrorCode::kUnavailable, "no such name"};
    co_return addresses;
  }
  std::vector<tcp::endpoint> addresses;
  int asked = 0;
};

// Answers each request with its own name, and keeps the connection.
testing::RawServer::Script answering(const std::string& name) {
  return [name](testing::RawConnection& connection, int) {
    while (!connection.read_head().empty()) {
      connection.send("HTTP/1.1 200 OK\r\nContent-Length: " + std::to_string(name.size()) + "\r\n\r\n" + name);
    }
  };
}

class ChangingNames : public ::testing::Test {
 protected:
  void SetUp() override {
    loop_.call([this] {
      ClientOptions options;
      options.resolver = resolver_;
      client_ = std::make_unique<HttpClient>(loop_.executor(), options);
      return 0;
    });
    point_to(old_);
  }
  void TearDown() override {
    loop_.call([this] {
      client_.reset();
      return 0;
    });
  }
  void point_to(const testing::RawServer& server) {
    loop_.call([&] {
      resolver_->addresses = {tcp::endpoint(asio::ip::make_address("127.0.0.1"), server.port())};
      return 0;
    });
  }
  std::string ask() {
    return loop_.run([this]() -> Task<std::string> {
      std::string target = "/";
      const Result<std::string> body = co_await client_->get(name_, std::move(target), 100, 2'000ms);
      co_return body ? *body : body.error().message;
    });
  }
  void refresh() {
    loop_.run([this]() -> Task<void> { co_await client_->refresh(name_); });
  }

  testing::TestLoop loop_;
  testing::RawServer old_{answering("old")};
  testing::RawServer new_{answering("new")};
  std::shared_ptr<FixedResolver> resolver_ = std::make_shared<FixedResolver>();
  std::unique_ptr<HttpClient> client_;
  const Endpoint name_{"worker.example", 80};
};

TEST_F(ChangingNames, EachNewConnectionAsksAnew) {
  EXPECT_EQ(ask(), "old");
  EXPECT_EQ(ask(), "old");
  EXPECT_EQ(old_.connections(), 1);  // kept
  EXPECT_EQ(resolver_->asked, 1);
}

TEST_F(ChangingNames, ARefreshRetiresConnectionsToAddressesThatAreGone) {
  EXPECT_EQ(ask(), "old");
  point_to(new_);
  EXPECT_EQ(ask(), "old");  // nobody has looked yet
  refresh();
  EXPECT_EQ(ask(), "new");
  EXPECT_EQ(ask(), "new");
  EXPECT_EQ(new_.connections(), 1);
}

TEST_F(ChangingNames, ARefreshThatFindsTheSameOrNothingRetiresNothing) {
  EXPECT_EQ(ask(), "old");
  refresh();
  EXPECT_EQ(ask(), "old");
  loop_.call([this] {
    resolver_->addresses.clear();  // the name server is away
    return 0;
  });
  refresh();
  EXPECT_EQ(ask(), "old");
  EXPECT_EQ(old_.connections(), 1);
}

TEST_F(ChangingNames, AConnectionInUseIsRetiredWhenItComesBack) {
  const std::string body = loop_.run([this]() -> Task<std::string> {
    RequestHead head;
    head.method = "GET";
    head.target = "/";
    const std::span<const std::string_view> no_body;
    auto response = co_await client_->send(name_, std::move(head), no_body, CancelToken());
    if (!response) co_return response.error().message;
    resolver_->addresses = {tcp::endpoint(asio::ip::make_address("127.0.0.1"), new_.port())};
    co_await client_->refresh(name_);
    const Result<std::string> text = co_await (*response)->read_all(100);
    co_return text ? *text : text.error().message;
  });
  EXPECT_EQ(body, "old");
  EXPECT_EQ(ask(), "new");
}

}  // namespace
}  // namespace kindred::net
