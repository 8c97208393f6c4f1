// A circuit breaker over the requests of one worker: what health checks do not see (a worker whose
// /health answers while its requests fail) still takes it out.
//
//   closed     requests pass. `faults_until_open` faults in a row open it.
//   open       none pass, for `open_ms`.
//   half-open  `probes` requests at a time pass. The first that succeeds closes it, a fault opens it again.
//
// A worker that comes back, from here or from failed health checks, starts slowly: for `slow_start_ms` it has
// a growing share of what the others get.
//
// Thread-safety: none; the owner's. Time is given, never read: states follow from it alone.
#pragma once

#include <chrono>
#include <cstdint>
#include <string_view>

#include "base/clock.h"

namespace kindred::fleet {

struct BreakerOptions {
  uint32_t faults_until_open = 3;              // >= 1
  std::chrono::milliseconds open_ms{1'000};    // how long after it opened probe requests are let through
  uint32_t probes = 2;                         // requests under way at once while half-open, >= 1
  std::chrono::milliseconds slow_start_ms{0};  // 0: a whole share at once
};

enum class BreakerState { kClosed, kOpen, kHalfOpen };
std::string_view to_string(BreakerState state);

class Breaker {
 public:
  BreakerState state(const BreakerOptions& options, MonotonicTime now) const;
  // Whether one more request may pass, with `probes` of those taken while half-open under way.
  bool admits(const BreakerOptions& options, MonotonicTime now, int64_t probes) const;

  // Each: whether that opened or closed it. `probes` as above: without one under way, the fault of a
  // half-open worker is that of a request from before it opened, and says nothing about now.
  bool fault(const BreakerOptions& options, MonotonicTime now, int64_t probes);
  // It began to answer: enough to close it, and not enough to forget faults, or one that breaks off each answer
  // would never be noticed. That takes a whole answer.
  bool answered(const BreakerOptions& options, MonotonicTime now);
  bool completed(const BreakerOptions& options, MonotonicTime now);
  // The next fault would open it.
  bool at_the_edge(const BreakerOptions& options) const { return !open_ && faults_ + 1 >= options.faults_until_open; }

  // The worker is back after health checks had taken it out: closed, and slow at first.
  void recovered(MonotonicTime now);

  // In (0, 1]: the part of a full share that the worker should have now.
  double share(const BreakerOptions& options, MonotonicTime now) const;

 private:
  bool open_ = false;     // or half-open
  MonotonicTime opened_;  // while open_
  bool slow_ = false;
  MonotonicTime back_;   // while slow_
  uint32_t faults_ = 0;  // in a row
};

}  // namespace kindred::fleet
