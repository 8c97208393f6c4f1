// Time as an interface, so that the simulator and the tests can replace it.
#pragma once

#include <chrono>
#include <cstdint>

namespace kindred {

// Nanoseconds since an arbitrary origin; never goes back.
using MonotonicTime = std::chrono::time_point<std::chrono::steady_clock, std::chrono::nanoseconds>;

class Clock {
 public:
  virtual ~Clock() = default;
  virtual MonotonicTime now() const = 0;
  virtual int64_t unix_seconds() const = 0;  // for `created` fields and logs only
  virtual double unix_time_s() const { return static_cast<double>(unix_seconds()); }  // finer, where it can be
};

// Thread-safe.
class SystemClock final : public Clock {
 public:
  MonotonicTime now() const override {
    return std::chrono::time_point_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now());
  }
  int64_t unix_seconds() const override {
    return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch())
        .count();
  }
  double unix_time_s() const override {
    return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  }
};

// Moves only when told. Not thread-safe.
class ManualClock final : public Clock {
 public:
  MonotonicTime now() const override { return now_; }
  int64_t unix_seconds() const override {
    return std::chrono::duration_cast<std::chrono::seconds>(now_.time_since_epoch()).count();
  }
  void advance(std::chrono::nanoseconds by) { now_ += by; }

 private:
  MonotonicTime now_{};
};

inline double seconds_between(MonotonicTime from, MonotonicTime to) {
  return std::chrono::duration<double>(to - from).count();
}

}  // namespace kindred
