// The engine: one llama.cpp context, a thread that steps it, continuous batching with chunked prefill.
//
// Each step takes one token of every decoding sequence and fills the token budget with prompt tokens
// of admitted sequences, oldest first. Jobs are admitted in the order of policy/queue_order.h. With
// KvAdmission::kReserve a job is admitted when KV for its whole prompt and all its max_tokens is free
// (cached blocks are evicted for it), so a running sequence is never preempted.
//
// Thread-safety: all but start and the destructor may be called from any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/clock.h"
#include "base/metrics.h"
#include "base/result.h"
#include "engine/model.h"
#include "engine/pace.h"
#include "engine/types.h"
#include "fleet/engine_trace.h"
#include "policy/queue_order.h"

namespace kindred::engine {

enum class KvAdmission {
  kReserve,     // the prompt and all max_tokens
  kOptimistic,  // the prompt and a block for each choice; who loses least work gives way when KV runs out
};

struct EngineOptions {
  uint32_t context_tokens = 4096;  // the longest prompt + output of one sequence
  uint32_t kv_tokens = 16384;      // KV cells, shared by all sequences and the prefix cache
  uint32_t sequences = 64;         // running at once, choices counted
  uint32_t waiting = 1024;         // jobs queued; more are refused with kExhausted
  uint32_t token_budget = 512;     // tokens a step, at most (llama.cpp's n_ubatch)
  uint32_t block_tokens = 16;      // KV block
  bool prefix_cache = true;
  bool capture_experts = true;
  uint32_t threads = 0;  // 0: all cores
  policy::QueueOptions queue = {};
  KvAdmission kv_admission = KvAdmission::kReserve;
  uint32_t rank = 0;  // of the engine within its worker
  // Steps are padded to its times (pace.h). Refused if its longest step exceeds kLongestPacedStep.
  std::optional<PaceProfile> pace = {};
};

struct EngineStats {
  uint32_t running = 0, waiting = 0;    // sequences, jobs
  uint32_t running_jobs = 0;            // admitted and not ended
  uint64_t waiting_prefill_tokens = 0;  // net of prefix hits
  uint64_t waiting_tokens = 0;          // prompts of waiting jobs, hits and handed-over ones included
  uint64_t remaining_prefill_tokens = 0;
  uint32_t kv_used_tokens = 0;    // by running sequences
  uint32_t kv_cached_tokens = 0;  // by the prefix cache alone
  uint32_t kv_tokens = 0;
  uint64_t generated_tokens = 0, prefix_queries = 0, prefix_hits = 0;  // tokens, since the start
};

class Engine {
 public:
  // `model`, `clock` and `metrics` must outlive the engine. Errors: kInvalid for options that the model
  // or llama.cpp cannot serve, kExhausted when KV memory cannot be had.
  static Result<std::unique_ptr<Engine>> start(const Model& model, const EngineOptions& options, const Clock& clock,
                                               Registry& metrics);
  ~Engine();  // cancels what runs, joins the thread

  // kInvalid, kExhausted (queue full). Otherwise events follow on the engine's thread.
  Result<JobId> submit(Job job);
  // Takes effect within one step: its KV is freed and no further event is delivered after the step in
  // progress, except one final Error{kCancelled}. Unknown ids are ignored.
  void cancel(JobId id);
  void drop_prefix_cache();

  EngineStats stats() const;
  // As of now: a job is in it once submit() has returned. Epoch, sequence, time and expert pressure are the
  // worker's to fill in.
  fleet::EngineTrace trace() const;
  // Called when a trace may have changed, from any thread; must not block or call the engine. One at a time.
  void on_change(std::function<void()> listener);
  uint64_t kv_bytes() const;  // of all kv_tokens; 0: unknown
  // What is in force: context_tokens is no more than the model and the KV allow, threads are counted.
  const EngineOptions& options() const;

 private:
  struct Impl;
  explicit Engine(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kindred::engine
