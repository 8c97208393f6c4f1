#include "router/retry.h"

#include <fmt/format.h>

#include <charconv>

namespace kindred::router {

Result<RetryStatuses> RetryStatuses::parse(std::span<const std::string> names) {
  RetryStatuses out;
  for (const std::string& name : names) {
    if (name == "none" && names.size() == 1) return out;
    if (name == "4xx" || name == "5xx") {
      const int from = name == "4xx" ? 400 : 500;
      for (int status = from; status < from + 100; ++status) out.set_.set(slot(status));
      continue;
    }
    int status = 0;
    const char* end = name.data() + name.size();
    const auto [at, error] = std::from_chars(name.data(), end, status);
    if (error != std::errc{} || at != end || status < kFirst || status > kLast) {
      return invalid(
          fmt::format("retry_on: '{}' is no status; accepted: {} to {}, 4xx, 5xx, or none alone", name, kFirst, kLast),
          "retry_on");
    }
    out.set_.set(slot(status));
  }
  return out;
}

}  // namespace kindred::router
