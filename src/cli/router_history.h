// The options of `kindred router` that are about the experts of prompts that it has seen.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/config.h"
#include "router/options.h"

namespace kindred::cli {

struct HistoryArguments {
  std::vector<std::string> history_shapes;
  int64_t history_bytes = 128LL << 20;
  double history_sample = 0.1, history_least_share = 0.25;

  // The arguments must outlive the schema.
  void add_to(ConfigSchema& schema);
  void apply(router::RouterOptions& out) const;
};

}  // namespace kindred::cli
