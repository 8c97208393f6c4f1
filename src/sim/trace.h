// What arrives: requests with their times and sizes, read from the trace files that others publish or drawn
// from a process.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kindred::sim {

struct TraceRequest {
  double arrival_s = 0;  // since the trace's beginning; ascending
  uint32_t prompt_tokens = 0;
  uint32_t output_tokens = 0;
  std::vector<uint64_t> blocks = {};  // of the prompt, by content: equal prefixes have equal first blocks; may be empty
  int32_t expert_profile = -1;        // row of an activations file; -1: none given
  int32_t domain = -1;                // of Trace::domains; -1: none given
};

struct Trace {
  std::vector<TraceRequest> requests;
  std::vector<std::string> domains;
  uint32_t block_tokens = 512;  // that one entry of `blocks` stands for (Mooncake: 512)
  uint64_t skipped = 0;         // requests that were left out, since they generated nothing
};

}  // namespace kindred::sim
