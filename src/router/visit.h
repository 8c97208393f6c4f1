// A request's passage through the edge: who calls, whether they may, and what is noted at the end.
//
// Thread-safety: none; lives in the request's coroutine, beside its Exchange.
#pragma once

#include <optional>

#include "router/edge.h"
#include "router/exchange.h"

namespace kindred::router {

class Visit {
 public:
  Visit(Core& core, Exchange& exchange);
  // Settles the caller's tokens, writes the access log's line, and hands in the spans.
  ~Visit();
  Visit(const Visit&) = delete;
  Visit& operator=(const Visit&) = delete;

  // Why the caller is turned away, if so. For everything but health.
  std::optional<ApiError> admit_caller();
  // For operators' paths. `own_listener`: which only they can reach.
  std::optional<ApiError> admit_operator(bool own_listener) const;
  // Takes the request out of the caller's limits; its body must be there.
  std::optional<ApiError> charge();

 private:
  void write_line(AccessLog& log) const;
  void hand_in_spans();

  Core& core_;
  Exchange& exchange_;
  KeyLimits limits_;
  uint64_t charged_tokens_ = 0;
  bool charged_ = false;
  std::optional<size_t> span_;
};

}  // namespace kindred::router
