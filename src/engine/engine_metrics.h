// The engine's metrics: vLLM's names where the meaning is vLLM's, kindred_* otherwise.
//
// Thread-safety: as base/metrics.h.
#pragma once

#include <string>

#include "base/metrics.h"
#include "engine/types.h"

namespace kindred::engine {

class EngineMetrics {
 public:
  // `registry` must outlive it.
  EngineMetrics(Registry& registry, const std::string& model_name);

  Counter& finished(FinishReason reason) const;

  Gauge& running;
  Gauge& waiting;
  Gauge& kv_usage;  // 0..1
  Gauge& kv_cached_tokens;
  Counter& prompt_tokens;
  Counter& generation_tokens;
  Counter& prefix_queries;  // tokens, as in vLLM
  Counter& prefix_hits;
  Counter& evicted_blocks;
  Counter& prompt_tokens_evaluated;
  // Sums over the steps with at least one decoding token.
  Counter& decode_steps;
  Counter& decode_sequences;
  Counter& decode_active_experts;  // mean over layers of the distinct experts of the step's decode tokens
  Counter& lost_rows;              // batches whose expert rows were not usable
  Histogram& step_seconds;

 private:
  Counter& stop_;
  Counter& length_;
  Counter& abort_;
};

}  // namespace kindred::engine
