// A thread that reads what workers publish over ZeroMQ: one subscription per worker, in turn, each a burst at a time.
//
// Subscription is whatever a feed keeps of one worker; it is made by whoever adds it and belongs to the thread from
// then on. The thread starts with the first one.
//
// Thread-safety: add(), remove(), reset() and size() may be called from any thread; the handler's methods are called
// on the feed's own.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>
#include <zmq.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "fleet/fleet.h"
#include "net/zmq.h"

namespace kindred::router {

template <class Subscription>
class FeedLoop {
 public:
  using WorkerId = fleet::WorkerId;
  static constexpr size_t kBurst = 64;  // messages of one worker before the next worker's turn

  class Handler {
   public:
    virtual ~Handler() = default;
    // Takes what is there; called at least every 100 ms.
    virtual void serve(WorkerId worker, Subscription& subscription) = 0;
    // The socket whose messages are waited for.
    virtual const net::ZmqSocket& awaited(const Subscription& subscription) const = 0;
    virtual void reset(WorkerId worker, Subscription& subscription) = 0;
    virtual void removed(WorkerId worker) = 0;
  };

  // `handler` is borrowed.
  explicit FeedLoop(Handler& handler) : handler_(handler), wake_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    KINDRED_CHECK(wake_ >= 0);
  }
  FeedLoop(const FeedLoop&) = delete;
  FeedLoop& operator=(const FeedLoop&) = delete;
  ~FeedLoop() {
    stop();
    close(wake_);
  }

  // Ends the thread; to be called before what the handler uses goes.
  void stop() {
    stop_ = true;
    wake();
    if (thread_.joinable()) thread_.join();
  }

  // Instead of the one that the worker had. A socket may change threads, with a fence between, which the mutex is.
  void add(WorkerId worker, Subscription subscription) { post({.worker = worker, .added = std::move(subscription)}); }
  void remove(WorkerId worker) { post({.worker = worker, .removes = true}); }
  void reset(WorkerId worker) { post({.worker = worker}); }
  size_t size() const { return count_; }

 private:
  struct Command {
    WorkerId worker = 0;
    std::optional<Subscription> added = {};
    bool removes = false;  // neither: a reset
  };

  void post(Command command) {
    {
      const std::lock_guard lock(mutex_);
      if (!thread_.joinable()) {
        if (!command.added) return;  // there is nobody to remove
        thread_ = std::thread([this] { run(); });
      }
      commands_.push_back(std::move(command));
    }
    wake();
  }
  void wake() const {
    const uint64_t one = 1;
    (void)!write(wake_, &one, sizeof(one));
  }

  void run() {
    constexpr std::chrono::milliseconds kTick{100};
    std::vector<zmq_pollitem_t> items;
    while (!stop_) {
      obey();
      for (auto& [worker, subscription] : subscriptions_) handler_.serve(worker, subscription);
      items.clear();
      items.push_back({.socket = nullptr, .fd = wake_, .events = ZMQ_POLLIN, .revents = 0});
      for (const auto& [worker, subscription] : subscriptions_) {
        items.push_back(
            {.socket = handler_.awaited(subscription).handle(), .fd = 0, .events = ZMQ_POLLIN, .revents = 0});
      }
      zmq_poll(items.data(), static_cast<int>(items.size()), kTick.count());
      uint64_t count = 0;
      (void)!read(wake_, &count, sizeof(count));
    }
    subscriptions_.clear();
  }

  void obey() {
    std::vector<Command> commands;
    {
      const std::lock_guard lock(mutex_);
      commands.swap(commands_);
    }
    for (Command& command : commands) {
      const auto known = subscriptions_.find(command.worker);
      if (command.added) {
        subscriptions_.insert_or_assign(command.worker, *std::move(command.added));
      } else if (known != subscriptions_.end()) {
        if (command.removes) {
          subscriptions_.erase(known);
          handler_.removed(command.worker);
        } else {
          handler_.reset(command.worker, known->second);
        }
      }
    }
    count_ = subscriptions_.size();
  }

  Handler& handler_;
  const int wake_;
  std::atomic<bool> stop_{false};
  std::atomic<size_t> count_{0};
  std::map<WorkerId, Subscription> subscriptions_;  // the thread's own
  std::mutex mutex_;
  std::vector<Command> commands_;  // under the mutex
  std::thread thread_;
};

}  // namespace kindred::router
