// The options of `kindred router` that are about engines and what they say of themselves.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/config.h"
#include "router/options.h"

namespace kindred::cli {

struct EngineArguments {
  std::string engine_policy = "none";
  policy::PressureOptions pressure;
  int64_t engine_clients = 1;
  std::vector<std::string> traces;
  int64_t trace_max_age_ms = 3'000, trace_grace_ms = 2'000;
  std::string vllm_priority = "auto";
  double priority_ms_per_token = 1;

  // The arguments must outlive the schema.
  void add_to(ConfigSchema& schema);
  // Ties and seed are those of the prefill policy, whose place it takes.
  void apply(router::RouterOptions& out) const;
};

}  // namespace kindred::cli
