// The engine's metrics: vLLM's names where the meaning is vLLM's, kindred_* otherwise.
//
// Thread-safety: as base/metrics.h.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/metrics.h"
#include "engine/types.h"

namespace kindred::engine {

class EngineMetrics {
 public:
  // `registry` must outlive it.
  // `rank`: the engine's within its worker; a label of all of them, as in vLLM.
  EngineMetrics(Registry& registry, const std::string& model_name, uint32_t rank);

  Counter& finished(FinishReason reason) const;
  // One step with `sequences` > 0 decoding sequences. `active_experts`: distinct experts they selected,
  // mean over layers; less than 0: unknown. Belongs to the engine's thread.
  void count_decode_step(uint32_t sequences, double active_experts);

  Gauge& running;
  Gauge& waiting;
  Gauge& kv_usage;  // 0..1
  Gauge& kv_cached_tokens;
  Gauge& remaining_prefill_tokens;
  Gauge& waiting_prefill_tokens;
  Counter& prompt_tokens;
  Counter& generation_tokens;
  Counter& prefix_queries;  // tokens, as in vLLM
  Counter& prefix_hits;
  Counter& evicted_blocks;
  Counter& prompt_tokens_evaluated;
  Counter& preemptions;
  Counter& recomputed_tokens;  // prompt and generated ones, after a preemption
  Counter& decode_sequences;   // summed over the steps with at least one decoding token
  Counter& lost_rows;          // batches whose expert rows were not usable
  Histogram& step_seconds;

 private:
  EngineMetrics(Registry& registry, const Labels& labels);

  // Labelled by the number of sequences, so that figures can be compared at equal batch sizes. Made when
  // a size is first met: most never are.
  struct DecodeSteps {
    Counter* steps = nullptr;
    Counter* active_experts = nullptr;
  };

  Registry& registry_;
  const Labels labels_;
  std::vector<DecodeSteps> decode_steps_;  // by sequences
  Counter& stop_;
  Counter& length_;
  Counter& abort_;
};

}  // namespace kindred::engine
