// Several io_contexts with a thread each, and servers on them that share a port.
#include "net/io_threads.h"

#include <gtest/gtest.h>

#include <atomic>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "net/http_server.h"
#include "net/testing.h"

namespace kindred::net {
namespace {

using namespace std::chrono_literals;
using testing::raw_connect;
using testing::RawConnection;
using testing::TestLoop;

TEST(IoThreads, EachContextHasAThreadOfItsOwn) {
  IoThreads threads(3);
  std::mutex mutex;
  std::set<std::thread::id> seen;
  std::atomic<int> left{3};
  for (const auto& executor : threads.executors()) {
    asio::post(executor, [&] {
      const std::lock_guard lock(mutex);
      seen.insert(std::this_thread::get_id());
      if (--left == 0) threads.stop();
    });
  }
  auto busy = asio::make_work_guard(threads.first());  // so that only stop() ends it
  threads.run();
  EXPECT_EQ(seen.size(), 3U);
  EXPECT_TRUE(seen.contains(std::this_thread::get_id()));
}

// Each coroutine ends up in a handler of one context while it holds a timer of another.
TEST(IoThreads, WhatWaitsAtTheEndMayHoldObjectsOfOtherContexts) {
  const auto held = std::make_shared<int>(0);
  {
    IoThreads threads(2);
    const auto executors = threads.executors();
    for (size_t i = 0; i < 2; ++i) {
      const auto here = executors[i], there = executors[1 - i];
      const auto wait = [](asio::any_io_executor on, std::shared_ptr<int>) -> Task<void> {
        asio::steady_timer timer(on, 1h);
        co_await timer.async_wait(kNoThrow);
      };
      const auto outer = [wait](asio::any_io_executor on, asio::any_io_executor other,
                                std::shared_ptr<int> with) -> Task<void> {
        asio::steady_timer mine(on, 1h);
        co_await asio::co_spawn(other, wait(other, with), asio::use_awaitable);
      };
      asio::co_spawn(here, outer(here, there, held), asio::detached);
    }
    asio::steady_timer stop(threads.first(), 30ms);
    stop.async_wait([&](boost::system::error_code) { threads.stop(); });
    threads.run();
    EXPECT_GT(held.use_count(), 1);
  }
  EXPECT_EQ(held.use_count(), 1);
}

class SharedPort : public ::testing::Test {
 protected:
  void serve(ServerOptions options) {
    for (auto& loop : loops_) {
      servers_.push_back(std::make_unique<HttpServer>(
          loop.executor(), options, [this](Request& request, ResponseWriter& out) { return handle(request, out); }));
    }
    loops_[0].call([this] {
      servers_[0]->share_with({servers_[1].get(), servers_[2].get()});
      const auto port = servers_[0]->listen("127.0.0.1", 0);
      EXPECT_TRUE(port.ok());
      port_ = *port;
      return 0;
    });
  }
  void TearDown() override {
    for (size_t i = 0; i < servers_.size(); ++i) loops_[i].run([&] { return servers_[i]->drain(0ms); });
    for (size_t i = 0; i < servers_.size(); ++i) {
      loops_[i].call([&] {
        servers_[i].reset();
        return 0;
      });
    }
    for (auto& loop : loops_) loop.stop();
  }
  Task<void> handle(Request& request, ResponseWriter& out) {
    {
      const std::lock_guard lock(mutex_);
      ++by_thread_[std::this_thread::get_id()];
    }
    if (request.head.path() == "/hang") {
      while (!request.cancel.cancelled() && !go_on_) {
        asio::steady_timer timer(co_await asio::this_coro::executor, 2ms);
        co_await timer.async_wait(kNoThrow);
      }
    }
    co_await out.send(200, {}, "here");
  }
  size_t threads_used() {
    const std::lock_guard lock(mutex_);
    return by_thread_.size();
  }
  static std::string get(const std::string& path) { return "GET " + path + " HTTP/1.1\r\nHost: h\r\n\r\n"; }

  std::array<TestLoop, 3> loops_;
  std::vector<std::unique_ptr<HttpServer>> servers_;
  uint16_t port_ = 0;
  std::atomic<bool> go_on_{false};
  std::mutex mutex_;
  std::map<std::thread::id, size_t> by_thread_;
};

TEST_F(SharedPort, ConnectionsGoToWhomeverHasFewestAndStayThere) {
  serve({});
  std::vector<std::unique_ptr<RawConnection>> clients;
  for (int i = 0; i < 12; ++i) {
    clients.emplace_back(new RawConnection(raw_connect(port_)));
    for (int request = 0; request < 2; ++request) {
      clients.back()->send(get("/"));
      EXPECT_NE(clients.back()->read_message().find("here"), std::string::npos);
    }
  }
  EXPECT_EQ(by_thread_.size(), 3U);
  for (const auto& [thread, requests] : by_thread_) EXPECT_EQ(requests, 8U);
  EXPECT_EQ(servers_[0]->connections(), 12U);
}

TEST_F(SharedPort, TheLimitOfConnectionsIsOneForAll) {
  ServerOptions options;
  options.connections = 4;
  serve(options);
  std::vector<std::unique_ptr<RawConnection>> clients;
  for (int i = 0; i < 8; ++i) {
    clients.emplace_back(new RawConnection(raw_connect(port_)));
    clients.back()->send(get("/"));
    const std::string answer = clients.back()->read_message();
    EXPECT_EQ(answer.substr(9, 3), i < 4 ? "200" : "503") << i;
  }
  clients[0]->close();
  bool again = false;
  for (int i = 0; i < 200 && !again; ++i) {
    RawConnection next(raw_connect(port_));
    next.send(get("/"));
    again = next.read_message().substr(9, 3) == "200";
    std::this_thread::sleep_for(5ms);
  }
  EXPECT_TRUE(again);
}

TEST_F(SharedPort, EachServerFinishesWhatItHas) {
  serve({});
  std::vector<std::unique_ptr<RawConnection>> clients;
  for (int i = 0; i < 6; ++i) {
    clients.emplace_back(new RawConnection(raw_connect(port_)));
    clients.back()->send(get("/hang"));
  }
  while (servers_[0]->connections() < 6 || threads_used() < 3) std::this_thread::sleep_for(1ms);
  std::vector<std::future<void>> drained;
  for (size_t i = 0; i < 3; ++i) {
    drained.push_back(loops_[i].start([this, i]() -> Task<void> { co_await servers_[i]->drain(10s); }));
  }
  EXPECT_EQ(drained[1].wait_for(50ms), std::future_status::timeout);
  go_on_ = true;
  for (const auto& client : clients) EXPECT_NE(client->read_message().find("here"), std::string::npos);
  for (auto& one : drained) EXPECT_EQ(one.wait_for(5s), std::future_status::ready);
  EXPECT_EQ(servers_[0]->connections(), 0U);
}

}  // namespace
}  // namespace kindred::net
