// The KV that a prefill worker holds for a request until the decode worker has pulled it.
//
// Thread-safety: any thread. Calls to renew are made on the control loop, those to release on the request's own.
#pragma once

#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "router/core.h"
#include "router/prefill_reply.h"

namespace kindred::router {

class LeaseHold;

// Renews the leases that are held, each at a third of its time to live, kMaxRenewals times at most and
// kMaxCalls at once; what has no turn then has it at the next. A lease that its worker does not know any
// more is left alone: the decode worker will say so.
class LeaseKeeper : public std::enable_shared_from_this<LeaseKeeper> {
 public:
  LeaseKeeper(const net::asio::any_io_executor& executor, const Clock& clock) : clock_(clock), timer_(executor) {}

  // Of the control loop.
  static net::Task<void> run(CorePtr core);  // until the router closes
  void stop() { timer_.cancel(); }

  static constexpr uint32_t kMaxRenewals = 200;
  static constexpr size_t kMaxCalls = 256;

 private:
  friend class LeaseHold;
  struct Entry;
  using Queue = std::multimap<MonotonicTime, std::shared_ptr<Entry>>;
  struct Entry {
    fleet::WorkerId worker = 0;                // does not change
    std::chrono::milliseconds interval_ms{0};  // does not change
    uint32_t renewals = 0;                     // the control loop's
    std::string lease;                         // under the mutex; empty: released
    std::optional<Queue::iterator> turn;       // under the mutex; while it is in the queue
  };

  void add(const std::shared_ptr<Entry>& entry, std::chrono::milliseconds in);
  std::string give_up(Entry& entry);  // its lease, once
  void release(const CorePtr& core, Loop& loop, fleet::WorkerId worker, std::string lease, size_t at_once);
  static net::Task<void> release_soon(CorePtr core, Loop& loop, fleet::WorkerId worker);
  void drop(Entry& entry);  // with the mutex held
  std::shared_ptr<Entry> next_due(MonotonicTime now);
  std::chrono::milliseconds sleep_from(MonotonicTime now);
  void renew_due(const CorePtr& core);
  static net::Task<void> renew(CorePtr core, std::shared_ptr<Entry> entry);

  const Clock& clock_;
  net::asio::steady_timer timer_;               // the control loop's
  size_t calls_ = 0;                            // the control loop's
  std::mutex mutex_;                            // guards what follows
  Queue queue_;                                 // by when
  MonotonicTime wakes_ = MonotonicTime::max();  // when run() looks next
  // Leases of a worker that a loop is to release in one call.
  std::map<std::pair<const Loop*, fleet::WorkerId>, std::vector<std::string>> outbox_;
};

// Keeps the lease alive, and releases it exactly once: when told, or when it is dropped, whatever ended the
// request. The call to the worker runs in the background, together with others that come within milliseconds where
// the worker takes them so; if it fails the lease ends with its time to live.
class LeaseHold {
 public:
  // The lease of `reply`, which `worker` gave.
  LeaseHold(CorePtr core, Loop& loop, fleet::WorkerId worker, const PrefillReply& reply);
  LeaseHold(const LeaseHold&) = delete;
  LeaseHold& operator=(const LeaseHold&) = delete;
  ~LeaseHold() { release(); }

  void release();

 private:
  CorePtr core_;
  Loop& loop_;
  size_t at_once_;
  std::shared_ptr<LeaseKeeper::Entry> entry_;
};

void start_renewing(const CorePtr& core);

}  // namespace kindred::router
