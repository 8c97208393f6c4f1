// What the engine's thread does: admits jobs, builds batches, hands results out.
//
// KV is reserved for the worst case when a job is admitted: its prompt once, and max_tokens for each
// choice. The sum of all reservations and of the cached blocks never passes the cells there are, so a
// running sequence always finds room.
//
// Thread-safety: none; belongs to the engine's thread.
#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/log.h"
#include "base/metrics.h"
#include "engine/engine.h"
#include "engine/engine_metrics.h"
#include "engine/llama_session.h"
#include "engine/prefix_cache.h"
#include "engine/sampler.h"
#include "engine/text_assembler.h"

namespace kindred::engine {

class Scheduler {
 public:
  // All references must outlive the scheduler. `options` are valid and final (see Engine::start).
  Scheduler(const Model& model, const EngineOptions& options, const Clock& clock, Registry& metrics,
            std::unique_ptr<LlamaSession> session, std::vector<SequenceId> holders);

  void submit(JobId id, Job job);
  void cancel(JobId id);
  void cancel_all();
  void drop_prefix_cache();

  bool idle() const { return waiting_.empty() && running_.empty(); }
  // Admits what fits and evaluates one batch, if there is anything to evaluate.
  void step();

  EngineStats stats() const;

 private:
  struct Choice {
    ChoiceState state;
    TextAssembler text;
    Sampler sampler;
    SequenceId sequence = -1;  // -1: none (any more)
    uint32_t batch_index = 0;
    bool active() const { return state.finish == FinishReason::kNone; }
  };

  // An admitted job. Cells: `pinned` blocks of the cache, `reserved` of its own.
  struct Running {
    JobId id = 0;
    Job job;
    std::vector<Choice> choices;
    bool decoding = false;
    uint32_t computed = 0;  // prompt tokens in KV
    uint32_t cached = 0;    // of them, from the cache
    PrefixCache::Node node = PrefixCache::kRoot;
    uint32_t reserved = 0;
    uint32_t chunk_begin = 0, chunk = 0;  // this step's prompt tokens: first index in the batch, number
    bool in_batch = false;
    bool rows_lost = false;  // the counts below are incomplete
    std::optional<expert::ExpertCounts> counts, suffix, decode_counts;
    std::optional<std::vector<double>> gates;  // [L, E] sums
    uint32_t first_block = 0;                  // block_counts[0] is that of this block
    std::vector<std::vector<uint8_t>> block_counts;
    bool done = false;

    uint32_t prompt_tokens() const { return static_cast<uint32_t>(job.prompt.size()); }
  };
  struct Waiting {
    JobId id = 0;
    Job job;
  };

  // Admission (scheduler_admit.cpp).
  void admit();
  bool try_admit(Waiting& waiting);
  static size_t sequences_needed(const Job& job);
  static uint32_t cells_needed(const Job& job);
  uint32_t own_cells(const Job& job, const PrefixCache::Match& match) const;
  bool make_room(uint32_t cells);
  uint32_t free_cells() const;
  void start_prefill(Running& running, const PrefixCache::Match& match);
  void start_decode(Running& running);
  std::vector<Choice> make_choices(const Job& job) const;

  // One batch (scheduler_step.cpp).
  bool build_batch();
  Status evaluate();
  void fail_batch(const Error& error);
  void observe_decode_experts(const ExpertCapture* experts);
  // Distinct experts that the batch's first `tokens` selected, mean over the captured layers.
  double distinct_experts(const ExpertCapture& experts, uint32_t tokens);
  void pace_step();
  void count_prompt(Running& running, const ExpertCapture* experts);
  void sum_gates(Running& running, const ExpertCapture* experts);
  void count_decode(Running& running, const ExpertCapture* experts);
  void handle_results();
  void finish_prefill(Running& running);
  void store_prefix(Running& running);
  // False: the job failed.
  bool sample(Running& running, size_t choice, std::span<const float> logits);
  void accept(Running& running, size_t choice, const Sample& sample);
  void end_choice(Running& running, size_t choice, FinishReason reason);

  // Ends (scheduler.cpp).
  void finish(Running& running);
  void fail(Running& running, Error error);
  void release(Running& running);
  void release_sequence(Choice& choice);
  void sweep();
  Usage usage(const Running& running) const;
  void publish_gauges();

  const Model& model_;
  const EngineOptions options_;
  const Clock& clock_;
  Logger log_{"engine"};
  EngineMetrics metrics_;
  std::unique_ptr<LlamaSession> session_;
  PrefixCache cache_;
  const bool cache_enabled_;
  std::vector<Token> end_tokens_;
  std::vector<SequenceId> free_sequences_;
  std::deque<Waiting> waiting_;
  std::list<Running> running_;  // in order of admission
  uint32_t reserved_ = 0;       // sum over running_
  uint32_t batch_decodes_ = 0;  // decode tokens in the batch, which come first
  bool batch_gates_ = false;    // a prompt in the batch wants its gates
  std::vector<uint64_t> expert_set_;
  SystemSleeper sleeper_;
  std::optional<Pacer> pacer_;
};

}  // namespace kindred::engine
