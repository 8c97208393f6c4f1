// Limits per API key: requests and tokens a minute, each a token bucket that holds one minute's worth.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>

#include "base/clock.h"
#include "net/http_message.h"
#include "router/keys.h"

namespace kindred::router {

// A plain value: full at first, refilled evenly, in debt where more was used than was foreseen.
class TokenBucket {
 public:
  TokenBucket(double capacity, MonotonicTime now) : capacity_(capacity), level_(capacity), at_(now) {}

  double capacity() const { return capacity_; }
  double level(MonotonicTime now) const;
  // How long until `amount` may be taken; 0: now. What is larger than the bucket needs a full one.
  double wait_s(double amount, MonotonicTime now) const;
  // May leave a debt. A negative amount gives back, up to the capacity.
  void take(double amount, MonotonicTime now);

 private:
  double capacity_;  // also what a minute refills
  double level_;
  MonotonicTime at_;
};

// Bounded: one entry per key name in use, at most KeyRing::kMostKeys. Thread-safe.
class RateLimiter {
 public:
  explicit RateLimiter(const Clock& clock) : clock_(clock) {}

  struct Window {
    uint64_t limit = 0, remaining = 0;
    double reset_s = 0;  // until it is full again
  };
  struct Verdict {
    bool admitted = true;
    std::string_view short_of = {};  // "requests" or "tokens"
    double retry_after_s = 0;
    std::optional<Window> requests, tokens;
  };
  // Takes one request and `tokens`, or nothing.
  Verdict admit(const std::string& name, const KeyLimits& limits, uint64_t tokens);
  // The request has ended: it was admitted with `estimated` tokens and used `actual`.
  void settle(const std::string& name, uint64_t estimated, uint64_t actual);
  // Forgets names that no key has any more.
  void keep_only(const KeyRing& ring);

 private:
  struct Account {
    KeyLimits limits;
    std::optional<TokenBucket> requests, tokens;
  };
  Account& account(const std::string& name, const KeyLimits& limits, MonotonicTime now);

  const Clock& clock_;
  std::mutex mutex_;
  std::unordered_map<std::string, Account> accounts_;
};

// `x-ratelimit-limit-requests`, `-remaining-`, `-reset-` and the same of tokens, as OpenAI names them.
void add_rate_headers(net::Headers& headers, const RateLimiter::Verdict& verdict);

}  // namespace kindred::router
