#include "fleet/breaker.h"

#include <algorithm>

namespace kindred::fleet {
namespace {

// The share a slow start begins with: enough to be measured, little enough to be harmless.
constexpr double kFirstShare = 0.1;

}  // namespace

std::string_view to_string(BreakerState state) {
  switch (state) {
    case BreakerState::kClosed: return "closed";
    case BreakerState::kOpen: return "open";
    case BreakerState::kHalfOpen: return "half_open";
  }
  return "?";
}

BreakerState Breaker::state(const BreakerOptions& options, MonotonicTime now) const {
  if (!open_) return BreakerState::kClosed;
  return now - opened_ < options.open_ms ? BreakerState::kOpen : BreakerState::kHalfOpen;
}

bool Breaker::admits(const BreakerOptions& options, MonotonicTime now, int64_t probes) const {
  switch (state(options, now)) {
    case BreakerState::kClosed: return true;
    case BreakerState::kOpen: return false;
    case BreakerState::kHalfOpen: return probes < static_cast<int64_t>(options.probes);
  }
  return false;
}

bool Breaker::fault(const BreakerOptions& options, MonotonicTime now, int64_t probes) {
  faults_ = std::min(faults_ + 1, options.faults_until_open);
  if (open_) {
    if (probes > 0 && state(options, now) == BreakerState::kHalfOpen) opened_ = now;
    return false;
  }
  if (faults_ < options.faults_until_open) return false;
  open_ = true;
  opened_ = now;
  return true;
}

bool Breaker::answered(const BreakerOptions& options, MonotonicTime now) {
  // While it is open, an answer is that of a request from before: it says nothing about now.
  if (state(options, now) != BreakerState::kHalfOpen) return false;
  recovered(now);
  return true;
}

bool Breaker::completed(const BreakerOptions& options, MonotonicTime now) {
  if (!open_) faults_ = 0;
  return answered(options, now);
}

void Breaker::recovered(MonotonicTime now) {
  open_ = false;
  faults_ = 0;
  slow_ = true;
  back_ = now;
}

double Breaker::share(const BreakerOptions& options, MonotonicTime now) const {
  if (!slow_ || options.slow_start_ms.count() <= 0) return 1;
  const std::chrono::duration<double> since = now - back_;
  return std::clamp(since / std::chrono::duration<double>(options.slow_start_ms), kFirstShare, 1.0);
}

}  // namespace kindred::fleet
