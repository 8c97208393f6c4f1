// What an engine says of its own load: GET /metrics in Prometheus' text format, whose names differ, and
// GET /v1/loads of SGLang and of kindred workers.
//
// Thread-safety: plain values and pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "fleet/dialect.h"

namespace kindred::fleet {

// The same of one data-parallel engine.
struct EngineLoad {
  uint32_t rank = 0;
  double running = 0, waiting = 0;  // requests
  double kv_usage = 0;              // 0..1
  double kv_used_tokens = 0;        // 0: not said
  double kv_tokens = 0;             // that there is room for; 0: not said
  // Prefill tokens not computed yet; without them the router goes by what it has sent itself.
  std::optional<double> remaining_prefill_tokens = {}, waiting_prefill_tokens = {};

  bool operator==(const EngineLoad&) const = default;
};

struct LoadReport {
  std::optional<double> running;   // requests, summed over the worker's engines
  std::optional<double> waiting;   // in its queue
  std::optional<double> kv_usage;  // 0..1, of the fullest engine
  // By rank, without holes; in metrics by the label `engine` or `dp_rank`. Empty unless all of them told both counts.
  std::vector<EngineLoad> engines = {};

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
