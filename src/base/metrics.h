// Metrics in Prometheus' text format. Instruments are owned by a Registry and handed out as
// references that stay valid as long as it lives.
//
// Thread-safety: creating instruments and rendering take a lock; adding, setting and observing are
// lock-free and may be called from any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kindred {

using Labels = std::vector<std::pair<std::string, std::string>>;

class Counter {
 public:
  void add(double by = 1) { value_.fetch_add(by, std::memory_order_relaxed); }
  double value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<double> value_{0};
};

class Gauge {
 public:
  void set(double to) { value_.store(to, std::memory_order_relaxed); }
  void add(double by) { value_.fetch_add(by, std::memory_order_relaxed); }
  // Sets it if `to` is more.
  void raise(double to) {
    double now = value();
    while (now < to && !value_.compare_exchange_weak(now, to, std::memory_order_relaxed)) {
    }
  }
  double value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<double> value_{0};
};

class Histogram {
 public:
  // `bounds`: upper bounds of the buckets, ascending; +Inf is added.
  explicit Histogram(std::span<const double> bounds);

  void observe(double value);
  uint64_t count() const { return count_.load(std::memory_order_relaxed); }
  double sum() const { return sum_.load(std::memory_order_relaxed); }
  std::span<const double> bounds() const { return bounds_; }
  uint64_t bucket(size_t i) const { return buckets_[i].load(std::memory_order_relaxed); }

 private:
  std::vector<double> bounds_;
  std::vector<std::atomic<uint64_t>> buckets_;  // one more than bounds_
  std::atomic<uint64_t> count_{0};
  std::atomic<double> sum_{0};
};

// Bucket bounds from 1 ms to 60 s, the range of TTFT and TPOT.
std::span<const double> latency_bounds_s();
// From 1 µs to 10 ms, for decisions.
std::span<const double> decision_bounds_s();

class Registry {
 public:
  // The same name and labels give the same instrument. One name has one kind and one help text.
  Counter& counter(std::string_view name, std::string_view help, Labels labels = {});
  Gauge& gauge(std::string_view name, std::string_view help, Labels labels = {});
  Histogram& histogram(std::string_view name, std::string_view help, std::span<const double> bounds,
                       Labels labels = {});

  std::string render() const;  // text/plain; version=0.0.4

 private:
  enum class Kind { kCounter, kGauge, kHistogram };
  struct Series {
    Labels labels;
    std::unique_ptr<Counter> counter;
    std::unique_ptr<Gauge> gauge;
    std::unique_ptr<Histogram> histogram;
  };
  struct Family {
    std::string name, help;
    Kind kind;
    std::vector<std::unique_ptr<Series>> series;
  };

  Series& series(Kind kind, std::string_view name, std::string_view help, Labels&& labels);

  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Family>> families_;
};

}  // namespace kindred
