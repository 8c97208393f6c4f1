// The options of `kindred router` that are about requests on their way: how many at once, how long, how often.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/config.h"
#include "router/options.h"

namespace kindred::cli {

struct RequestArguments {
  int64_t max_inflight = 4096, queue = 1024, queue_wait_ms = 10'000, batch_headroom_percent = 10;
  int64_t decode_inflight = 0;
  int64_t retries = 2;
  std::vector<std::string> retry_on = {"429", "500", "502", "503", "504"};
  int64_t prefill_deadline_ms = 240'000, first_deadline_ms = 60'000;
  int64_t decode_deadline_ms = 600'000, idle_deadline_ms = 120'000;

  // The arguments must outlive the schema.
  void add_to(ConfigSchema& schema);
  void apply(router::RouterOptions& out) const;
};

}  // namespace kindred::cli
