#include "engine/engine_metrics.h"

#include <array>

#include "base/result.h"

namespace kindred::engine {
namespace {

constexpr auto kStepBounds = std::to_array<double>(
    {0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5});

Labels with(Labels labels, std::string name, std::string value) {
  labels.emplace_back(std::move(name), std::move(value));
  return labels;
}

Counter& finished_counter(Registry& registry, const Labels& labels, const char* reason) {
  return registry.counter("vllm:request_success_total", "Choices that ended, by reason.",
                          with(labels, "finished_reason", reason));
}

}  // namespace

EngineMetrics::EngineMetrics(Registry& r, const std::string& model, uint32_t rank)
    : EngineMetrics(r, Labels{{"model_name", model}, {"engine", std::to_string(rank)}}) {}

EngineMetrics::EngineMetrics(Registry& r, const Labels& labels)
    : running(r.gauge("vllm:num_requests_running", "Sequences being evaluated.", labels)),
      waiting(r.gauge("vllm:num_requests_waiting", "Jobs waiting for admission.", labels)),
      kv_usage(r.gauge("vllm:kv_cache_usage_perc", "Share of KV reserved by running sequences (1 is all).", labels)),
      kv_cached_tokens(r.gauge("kindred_kv_cached_tokens", "KV cells held by the prefix cache alone.", labels)),
      remaining_prefill_tokens(r.gauge("kindred_remaining_prefill_tokens",
                                       "Tokens that running jobs have to compute before they decode.", labels)),
      waiting_prefill_tokens(r.gauge("kindred_waiting_prefill_tokens",
                                     "Tokens that waiting jobs have to compute, net of prefix hits.", labels)),
      prompt_tokens(
          r.counter("vllm:prompt_tokens_total", "Prompt tokens of prefilled jobs, cached ones included.", labels)),
      generation_tokens(r.counter("vllm:generation_tokens_total", "Tokens generated.", labels)),
      prefix_queries(
          r.counter("vllm:prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.", labels)),
      prefix_hits(r.counter("vllm:prefix_cache_hits_total", "Prompt tokens found in the prefix cache.", labels)),
      evicted_blocks(r.counter("kindred_prefix_cache_evicted_blocks_total", "KV blocks evicted.", labels)),
      prompt_tokens_evaluated(r.counter("kindred_prompt_tokens_evaluated_total",
                                        "Prompt tokens that were computed, not taken from a cache or a handoff.",
                                        labels)),
      preemptions(r.counter("vllm:num_preemptions_total", "Jobs that lost their KV to others.", labels)),
      recomputed_tokens(
          r.counter("kindred_recomputed_tokens_total", "Tokens computed again after a preemption.", labels)),
      decode_sequences(
          r.counter("kindred_decode_sequences_total", "Decoding sequences, summed over the steps.", labels)),
      lost_rows(
          r.counter("kindred_captured_rows_lost_total", "Batches whose captured expert rows were not usable.", labels)),
      step_seconds(r.histogram("kindred_step_seconds", "Time of one batch, sampling included.", kStepBounds, labels)),
      registry_(r),
      labels_(labels),
      stop_(finished_counter(r, labels, "stop")),
      length_(finished_counter(r, labels, "length")),
      abort_(finished_counter(r, labels, "abort")) {}

void EngineMetrics::count_decode_step(uint32_t sequences, double active_experts) {
  KINDRED_CHECK(sequences > 0);
  if (decode_steps_.size() <= sequences) decode_steps_.resize(sequences + 1);
  DecodeSteps& of = decode_steps_[sequences];
  if (of.steps == nullptr) {
    const Labels labels = with(labels_, "sequences", std::to_string(sequences));
    of.steps = &registry_.counter("kindred_decode_steps_total", "Steps with so many decoding sequences.", labels);
    of.active_experts = &registry_.counter("kindred_decode_active_experts_total",
                                           "Distinct experts that a step's decoding sequences selected, mean over "
                                           "layers, summed over those steps.",
                                           labels);
  }
  of.steps->add();
  if (active_experts >= 0) of.active_experts->add(active_experts);
  decode_sequences.add(sequences);
}

Counter& EngineMetrics::finished(FinishReason reason) const {
  switch (reason) {
    case FinishReason::kStop: return stop_;
    case FinishReason::kLength: return length_;
    case FinishReason::kNone:
    case FinishReason::kCancelled: break;
  }
  return abort_;
}

}  // namespace kindred::engine
