// The options of `kindred router` that are about what workers hold of a prompt.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/config.h"
#include "router/options.h"

namespace kindred::cli {

struct KvArguments {
  std::vector<std::string> kv_events;
  int64_t kv_events_port = 0, kv_replay_port = 0;
  int64_t kv_index_bytes = 256LL << 20, kv_token_bytes = 64LL << 20, tokenize_timeout_ms = 500;
  double held_weight = 0;

  // The arguments must outlive the schema.
  void add_to(ConfigSchema& schema);
  void apply(router::RouterOptions& out) const;
};

}  // namespace kindred::cli
