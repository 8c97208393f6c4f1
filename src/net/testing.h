// Test only: raw peers that play a script over loopback, and a thread that runs tasks.
//
// RawServer and RawConnection block their own threads; every wait ends after kRawWait, so that a test
// fails and does not hang. Failures of the network show as empty or short results.
#pragma once

#include <atomic>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "net/http_message.h"
#include "net/task.h"

namespace kindred::net::testing {

inline constexpr std::chrono::milliseconds kRawWait{5'000};

// A blocking TCP connection. Owns its descriptor.
class RawConnection {
 public:
  explicit RawConnection(int fd) : fd_(fd) {}
  RawConnection(const RawConnection&) = delete;
  RawConnection& operator=(const RawConnection&) = delete;
  ~RawConnection() { close(); }

  bool open() const { return fd_ >= 0; }
  bool send(std::string_view bytes);
  // Up to and including the first `end`, or what came before the connection closed or the wait ended.
  std::string read_until(std::string_view end, std::chrono::milliseconds wait = kRawWait);
  std::string read_head() { return read_until("\r\n\r\n"); }
  std::string read_bytes(size_t count, std::chrono::milliseconds wait = kRawWait);
  // A head and the body its Content-Length gives.
  std::string read_message();
  std::string read_to_end(std::chrono::milliseconds wait = kRawWait);
  // Whether the peer closes (or resets) the connection; drops what it sends before.
  bool wait_closed(std::chrono::milliseconds wait = kRawWait);
  void shut_down_write();
  void close();
  void reset();  // closes with RST
  int fd() const { return fd_; }
  void interrupt();  // ends every wait; the only call that other threads may make

 private:
  // Waits for more bytes. False at the end, after an error, or at `deadline`.
  bool fill(std::chrono::steady_clock::time_point deadline);

  std::mutex closing_;  // so that interrupt() never meets a descriptor number used anew
  int fd_;
  std::string unread_;
  bool ended_ = false;
};

RawConnection raw_connect(uint16_t port);

// Listens on 127.0.0.1 and runs `script` on a thread of its own for each connection; `index` counts
// them from 0. The connection closes when its script returns. The destructor closes all of them (which
// ends their scripts' waits) and joins the threads.
class RawServer {
 public:
  using Script = std::function<void(RawConnection& connection, int index)>;
  explicit RawServer(Script script);
  ~RawServer();
  RawServer(const RawServer&) = delete;
  RawServer& operator=(const RawServer&) = delete;

  uint16_t port() const { return port_; }
  Endpoint endpoint() const { return Endpoint{"127.0.0.1", port_}; }
  int connections() const { return accepted_.load(); }

 private:
  void accept_loop();

  Script script_;
  int listener_ = -1;
  uint16_t port_ = 0;
  std::atomic<int> accepted_{0};
  std::mutex mutex_;
  bool stopping_ = false;
  std::vector<RawConnection*> open_;  // of running scripts
  std::vector<std::thread> scripts_;
  std::thread acceptor_;
};

// An io_context and the thread that runs it. Objects confined to it are made, used and destroyed in
// call() or run().
class TestLoop {
 public:
  TestLoop() : work_(asio::make_work_guard(context_)), thread_([this] { context_.run(); }) {}
  ~TestLoop() { stop(); }
  TestLoop(const TestLoop&) = delete;
  TestLoop& operator=(const TestLoop&) = delete;

  asio::io_context& context() { return context_; }
  asio::any_io_executor executor() { return context_.get_executor(); }

  // Runs `function` on the thread, and waits for what it returns.
  template <class Function>
  auto call(Function function) {
    using Value = decltype(function());
    std::packaged_task<Value()> task(std::move(function));
    auto future = task.get_future();
    asio::post(context_, [&task] { task(); });
    return future.get();
  }

  // Starts the task that `make` returns; the future holds its result. `make` lives as long as the task,
  // so that it may be a lambda with captures.
  template <class Make>
  auto start(Make make) {
    using Value = typename decltype(make())::value_type;
    const auto promise = std::make_shared<std::promise<Value>>();
    auto future = promise->get_future();
    call([&] { asio::co_spawn(context_, fulfil(std::move(make), promise), asio::detached); });
    return future;
  }
  template <class Make>
  auto run(Make make) {
    return start(std::move(make)).get();
  }

  void stop() {
    context_.stop();
    if (thread_.joinable()) thread_.join();
  }

 private:
  template <class Make, class Value>
  static Task<void> fulfil(Make make, std::shared_ptr<std::promise<Value>> promise) {
    try {
      if constexpr (std::is_void_v<Value>) {
        co_await make();
        promise->set_value();
      } else {
        promise->set_value(co_await make());
      }
    } catch (...) {
      promise->set_exception(std::current_exception());
    }
  }

  asio::io_context context_;
  asio::executor_work_guard<asio::io_context::executor_type> work_;
  std::thread thread_;
};

}  // namespace kindred::net::testing
