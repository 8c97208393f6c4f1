// How long a worker's step takes (design.md §5 and §6): a hardware profile applied to what is in the step.
#pragma once

#include <cstdint>
#include <span>

namespace kindred::sim {

// One forward pass of one worker. A step may mix chunks of prefill and decode tokens.
struct StepShape {
  uint32_t prefill_tokens = 0;        // computed in this step
  double prefill_token_contexts = 0;  // sum, over those tokens, of the context each attends to
  uint32_t decode_requests = 0;       // one token each
  double decode_context_tokens = 0;   // sum of their contexts: KV read
  // [MoE layers]: distinct experts that the rank with the most of them has to read.
  std::span<const uint32_t> experts = {};
  uint32_t ranks = 1;  // of expert parallelism
};

}  // namespace kindred::sim
