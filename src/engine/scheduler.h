// What the engine's thread does: admits jobs, builds batches, hands results out.
//
// The sum of all reservations and of the cached blocks never passes the cells there are. With KvAdmission::kReserve
// a job reserves the worst case when it is admitted: its prompt once, and max_tokens for each choice; so a running
// sequence always finds room. With kOptimistic it reserves its prompt and a block for each choice, and more as it
// goes on; when there is none, whoever loses least work is preempted and computes its KV again later.
//
// Thread-safety: none; belongs to the engine's thread.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
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
#include "policy/queue_order.h"

namespace kindred::engine {

class Scheduler {
 public:
  // All references must outlive the scheduler. `options` are valid and final (see Engine::start).
  Scheduler(const Model& model, const EngineOptions& options, const Clock& clock, Registry& metrics,
            std::unique_ptr<LlamaSession> session, std::vector<SequenceId> holders);

  // `arrived`: on `clock`; orders the queue.
  void submit(JobId id, Job job, MonotonicTime arrived);
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
    uint32_t reserved = 0;     // cells for generated tokens
    uint32_t in_kv = 0;        // generated tokens whose KV is here: all but the last, unless it was preempted
    bool decodes = false;      // in this step
    uint32_t replayed = 0;     // tokens computed again in this step
    uint32_t batch_index = 0;
    bool active() const { return state.finish == FinishReason::kNone; }
    // Tokens to compute again before the next one can be drawn.
    uint32_t to_replay() const { return static_cast<uint32_t>(state.generated.size()) - 1 - in_kv; }
  };

  // An admitted job. Cells: `pinned` blocks of the cache, `reserved` of its own.
  struct Running {
    JobId id = 0;
    Job job;
    MonotonicTime arrived;
    std::vector<Choice> choices;
    bool decoding = false;
    bool resumes = false;        // was preempted after its first tokens, which are out
    uint32_t computed = 0;       // prompt tokens in KV
    uint32_t cached = 0;         // of them, from the cache; when it resumes, those of the first time
    uint32_t lost_computed = 0;  // prompt tokens that were in KV before a preemption
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
    MonotonicTime arrived;
    // To compute before it decodes, net of what the prefix cache held when it began to wait. What is cached or
    // evicted since is not seen until it is admitted: looking up 1,024 prompts each step would cost more than an
    // order by fresher figures gains.
    uint64_t prefill_tokens = 0;
    // Of a job that was preempted: what it had before.
    bool preempted = false;
    uint32_t cached = 0, lost_computed = 0;
    bool rows_lost = false;
    std::optional<expert::ExpertCounts> decode_counts = {};
  };

  // Admission (scheduler_admit.cpp).
  void enqueue(Waiting waiting);
  Waiting dequeue(JobId id);
  void admit();
  bool try_admit(JobId id);
  bool uses_cache(const Job& job) const;
  static bool resumes(const Job& job);
  static size_t sequences_needed(const Job& job);
  // For the generated tokens of one choice, at admission.
  uint32_t decode_cells(const Job& job, const ChoiceState& choice) const;
  uint32_t cells_needed(const Job& job) const;
  uint32_t own_cells(const Job& job, const PrefixCache::Match& match) const;
  bool make_room(uint32_t cells);
  uint32_t free_cells() const;
  Running& start(Waiting waiting, const PrefixCache::Match& match, uint32_t cells);
  void start_prefill(Running& running, const PrefixCache::Match& match);
  void start_decode(Running& running);
  std::vector<Choice> make_choices(const Job& job) const;

  // Preemption (scheduler_preempt.cpp).
  // Every decoding choice gets the cell of its next token, if need be from others. Whether anybody was preempted.
  bool grow_decodes();
  bool grow(Running& running, Choice& choice);
  Running& least_loss();
  uint32_t tokens_lost(const Running& running) const;
  void preempt(Running& running);

  // One batch (scheduler_step.cpp).
  bool build_batch();
  void add_decodes(Running& running);
  // Within the token budget. False: it is used up.
  bool add_prompt(Running& running);
  bool add_replay(Running& running);
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
  void handle_decodes(Running& running, const ExpertCapture* experts);
  void handle_prompt(Running& running, const ExpertCapture* experts);
  void finish_prefill(Running& running);
  void resume(Running& running);
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
  static SequenceId prompt_sequence(const Running& running);
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
  std::unordered_map<JobId, Waiting> waiting_;
  policy::QueueOrder queue_;  // of waiting_, by id
  uint64_t waiting_prefill_tokens_ = 0, waiting_tokens_ = 0;
  std::list<Running> running_;  // in order of admission
  uint32_t reserved_ = 0;       // sum over running_
  uint32_t batch_decodes_ = 0;  // decode tokens in the batch, which come first
  bool batch_gates_ = false;    // a prompt in the batch wants its gates
  std::vector<uint64_t> expert_set_;
  SystemSleeper sleeper_;
  std::optional<Pacer> pacer_;
};

}  // namespace kindred::engine
