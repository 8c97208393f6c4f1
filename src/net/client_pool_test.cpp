// The bound on connections to one endpoint, seen by a peer that counts them.
#include <gtest/gtest.h>

#include <condition_variable>

#include "net/http_client.h"
#include "net/testing.h"

namespace kindred::net {
namespace {

using namespace std::chrono_literals;
using testing::RawConnection;
using testing::RawServer;
using testing::TestLoop;

constexpr std::string_view kOk = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

class PoolTest : public ::testing::Test {
 protected:
  ~PoolTest() override { loop_.stop(); }

  void limit(ClientOptions options) {
    loop_.call([&] { client_ = std::make_unique<HttpClient>(loop_.executor(), options); });
  }

  auto begin(const Endpoint& to, CancelToken cancel = {}) {
    return loop_.start([this, to, cancel]() -> Task<Result<std::string>> {
      RequestHead head;
      head.method = "POST";
      head.target = "/";
      auto response = co_await client_->send(to, std::move(head), {}, cancel, {});
      if (!response) co_return response.error();
      co_return co_await (*response)->read_all(1 << 20);
    });
  }

  TestLoop loop_;
  std::unique_ptr<HttpClient> client_;
};

// Answers only once it is let.
class Held {
 public:
  void let(int requests) {
    const std::lock_guard lock(mutex_);
    allowed_ += requests;
    changed_.notify_all();
  }
  void serve(RawConnection& peer) {
    while (!peer.read_message().empty()) {
      std::unique_lock lock(mutex_);
      ++seen_;
      changed_.notify_all();
      if (!changed_.wait_for(lock, 5s, [this] { return allowed_ > 0; })) return;
      --allowed_;
      lock.unlock();
      peer.send(kOk);
    }
  }
  bool wait_seen(int requests) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, 5s, [&] { return seen_ >= requests; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int allowed_ = 0, seen_ = 0;
};

TEST_F(PoolTest, RequestsOverTheLimitWaitTheirTurnAndReuseConnections) {
  ClientOptions options;
  options.connections_per_endpoint = 2;
  limit(options);
  Held held;
  RawServer server([&](RawConnection& peer, int) { held.serve(peer); });
  std::vector<std::future<Result<std::string>>> all;
  for (int i = 0; i < 6; ++i) all.push_back(begin(server.endpoint()));
  ASSERT_TRUE(held.wait_seen(2));
  held.let(6);
  for (auto& one : all) {
    const Result<std::string> body = one.get();
    EXPECT_TRUE(body.ok()) << body.error().message;
  }
  EXPECT_EQ(server.connections(), 2);
}

TEST_F(PoolTest, TheWaitIsBoundedInTimeAndInNumber) {
  ClientOptions options;
  options.connections_per_endpoint = 1;
  options.waiters_per_endpoint = 1;
  options.wait_timeout_ms = 50ms;
  limit(options);
  Held held;
  RawServer server([&](RawConnection& peer, int) { held.serve(peer); });
  auto first = begin(server.endpoint());
  ASSERT_TRUE(held.wait_seen(1));
  auto second = begin(server.endpoint());
  const Result<std::string> third = begin(server.endpoint()).get();  // the one place to wait is taken
  ASSERT_FALSE(third.ok());
  EXPECT_EQ(third.error().code, ErrorCode::kExhausted);
  const Result<std::string> waited = second.get();
  ASSERT_FALSE(waited.ok());
  EXPECT_EQ(waited.error().code, ErrorCode::kExhausted);
  held.let(2);
  EXPECT_TRUE(first.get().ok());
  EXPECT_TRUE(begin(server.endpoint()).get().ok());  // and the place is free again
  EXPECT_EQ(server.connections(), 1);
}

TEST_F(PoolTest, AWaiterThatLeavesAndALegThatIsCancelledGiveTheirPlacesBack) {
  ClientOptions options;
  options.connections_per_endpoint = 1;
  limit(options);
  Held held;
  RawServer server([&](RawConnection& peer, int) { held.serve(peer); });
  CancelSource leg, waiter;
  auto first = begin(server.endpoint(), leg.token());
  ASSERT_TRUE(held.wait_seen(1));
  auto second = begin(server.endpoint(), waiter.token());
  loop_.call([&] { waiter.cancel(); });
  EXPECT_EQ(second.get().error().code, ErrorCode::kCancelled);
  auto third = begin(server.endpoint());
  loop_.call([&] { leg.cancel(); });
  EXPECT_EQ(first.get().error().code, ErrorCode::kCancelled);
  held.let(2);
  EXPECT_TRUE(third.get().ok());
}

TEST_F(PoolTest, EachEndpointHasPlacesOfItsOwn) {
  ClientOptions options;
  options.connections_per_endpoint = 1;
  limit(options);
  Held held, other;
  RawServer busy([&](RawConnection& peer, int) { held.serve(peer); });
  RawServer free([&](RawConnection& peer, int) { other.serve(peer); });
  auto first = begin(busy.endpoint());
  ASSERT_TRUE(held.wait_seen(1));
  other.let(1);
  EXPECT_TRUE(begin(free.endpoint()).get().ok());
  held.let(1);
  EXPECT_TRUE(first.get().ok());
}

}  // namespace
}  // namespace kindred::net
