#include "router/rate_limit.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace kindred::router {
namespace {

constexpr double kWindowS = 60;

RateLimiter::Window window_of(const TokenBucket& bucket, MonotonicTime now) {
  const double level = bucket.level(now);
  RateLimiter::Window out;
  out.limit = static_cast<uint64_t>(bucket.capacity());
  out.remaining = static_cast<uint64_t>(std::max(0.0, std::floor(level)));
  out.reset_s = (bucket.capacity() - level) * kWindowS / bucket.capacity();
  return out;
}

void add_window(net::Headers& headers, std::string_view of, const RateLimiter::Window& window) {
  headers.add(fmt::format("x-ratelimit-limit-{}", of), fmt::format("{}", window.limit));
  headers.add(fmt::format("x-ratelimit-remaining-{}", of), fmt::format("{}", window.remaining));
  headers.add(fmt::format("x-ratelimit-reset-{}", of), fmt::format("{:.0f}ms", std::ceil(window.reset_s * 1000)));
}

}  // namespace

double TokenBucket::level(MonotonicTime now) const {
  const double refilled = seconds_between(at_, std::max(at_, now)) * capacity_ / kWindowS;
  return std::min(capacity_, level_ + refilled);
}

double TokenBucket::wait_s(double amount, MonotonicTime now) const {
  const double missing = std::min(amount, capacity_) - level(now);
  return missing <= 1e-9 ? 0 : missing * kWindowS / capacity_;  // what rounding leaves is no debt
}

void TokenBucket::take(double amount, MonotonicTime now) {
  level_ = std::min(capacity_, level(now) - amount);
  at_ = std::max(at_, now);
}

RateLimiter::Account& RateLimiter::account(const std::string& name, const KeyLimits& limits, MonotonicTime now) {
  const auto [at, fresh] = accounts_.try_emplace(name);
  Account& account = at->second;
  if (fresh || account.limits != limits) {
    account.limits = limits;
    account.requests.reset();
    account.tokens.reset();
    if (limits.requests_per_min > 0) account.requests.emplace(static_cast<double>(limits.requests_per_min), now);
    if (limits.tokens_per_min > 0) account.tokens.emplace(static_cast<double>(limits.tokens_per_min), now);
  }
  return account;
}

RateLimiter::Verdict RateLimiter::admit(const std::string& name, const KeyLimits& limits, uint64_t tokens) {
  Verdict out;
  if (limits == KeyLimits{}) return out;
  const MonotonicTime now = clock_.now();
  const auto amount = static_cast<double>(tokens);
  const std::lock_guard lock(mutex_);
  Account& of = account(name, limits, now);
  const double for_requests = of.requests ? of.requests->wait_s(1, now) : 0;
  const double for_tokens = of.tokens ? of.tokens->wait_s(amount, now) : 0;
  out.retry_after_s = std::max(for_requests, for_tokens);
  out.admitted = out.retry_after_s == 0;
  if (!out.admitted) out.short_of = for_requests >= for_tokens ? "requests" : "tokens";
  if (out.admitted && of.requests) of.requests->take(1, now);
  if (out.admitted && of.tokens) of.tokens->take(amount, now);
  if (of.requests) out.requests = window_of(*of.requests, now);
  if (of.tokens) out.tokens = window_of(*of.tokens, now);
  return out;
}

void RateLimiter::settle(const std::string& name, uint64_t estimated, uint64_t actual) {
  const MonotonicTime now = clock_.now();
  const std::lock_guard lock(mutex_);
  const auto at = accounts_.find(name);
  if (at == accounts_.end() || !at->second.tokens) return;
  at->second.tokens->take(static_cast<double>(actual) - static_cast<double>(estimated), now);
}

void RateLimiter::keep_only(const KeyRing& ring) {
  const std::lock_guard lock(mutex_);
  std::erase_if(accounts_, [&](const auto& entry) {
    return std::none_of(ring.keys().begin(), ring.keys().end(),
                        [&](const KeyRing::Key& key) { return key.name == entry.first; });
  });
}

void add_rate_headers(net::Headers& headers, const RateLimiter::Verdict& verdict) {
  if (verdict.requests) add_window(headers, "requests", *verdict.requests);
  if (verdict.tokens) add_window(headers, "tokens", *verdict.tokens);
}

}  // namespace kindred::router
