// What an engine says of its own load: GET /metrics in Prometheus' text format, whose names differ, and
// GET /v1/loads of SGLang.
//
// Thread-safety: plain values and pure functions.
#pragma once

#include <optional>
#include <string_view>

#include "fleet/dialect.h"

namespace kindred::fleet {

struct LoadReport {
  std::optional<double> running;   // requests, summed over the worker's engines
  std::optional<double> waiting;   // in its queue
  std::optional<double> kv_usage;  // 0..1, of the fullest engine

  // What is missing is unknown, not zero: without both counts there is no load.
  std::optional<double> requests() const {
    if (!running || !waiting) return std::nullopt;
    return *running + *waiting;
  }
};

// Untrusted input, read once without copies. Values that are negative, infinite or no numbers are left out.
LoadReport parse_load_metrics(Dialect dialect, std::string_view text);
// A rank without both counts leaves the whole without.
LoadReport parse_sglang_loads(std::string_view json);

}  // namespace kindred::fleet
