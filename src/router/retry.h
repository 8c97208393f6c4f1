// After which answers of a worker another worker is asked.
//
// Thread-safety: plain values.
#pragma once

#include <bitset>
#include <span>
#include <string>

#include "base/result.h"

namespace kindred::router {

class RetryStatuses {
 public:
  // Each of `names`: a status from 400 to 599, "4xx", "5xx", or "none" (alone). Error: kInvalid, naming
  // `retry_on`.
  static Result<RetryStatuses> parse(std::span<const std::string> names);

  bool contains(int status) const { return status >= kFirst && status <= kLast && set_[slot(status)]; }

 private:
  static constexpr int kFirst = 400, kLast = 599;
  static size_t slot(int status) { return static_cast<size_t>(status - kFirst); }

  std::bitset<kLast - kFirst + 1> set_;
};

}  // namespace kindred::router
