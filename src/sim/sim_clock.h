// The simulated clock: it stands still until the next event moves it.
//
// Thread-safety: none.
#pragma once

#include "base/clock.h"

namespace kindred::sim {

class SimClock final : public Clock {
 public:
  MonotonicTime now() const override { return now_; }
  int64_t unix_seconds() const override {
    return std::chrono::duration_cast<std::chrono::seconds>(now_.time_since_epoch()).count();
  }
  int64_t now_ns() const { return now_.time_since_epoch().count(); }
  void move_to(int64_t ns) { now_ = MonotonicTime(std::chrono::nanoseconds(ns)); }  // never back

 private:
  MonotonicTime now_{};
};

}  // namespace kindred::sim
