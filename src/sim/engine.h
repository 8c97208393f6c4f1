// One engine of a worker: continuous batching with chunked prefill, as vLLM's scheduler does it.
//
// A step takes every running sequence that decodes (one token each), then chunks of prompts, then admits who
// waits, in the queue's order (policy/queue_order.h), within `token_budget` tokens, `max_running` sequences and the
// KV blocks there are. Who is next and does not fit holds up all behind it. Who is admitted gets the blocks of all it
// has to compute or fetch. When a decoding sequence needs a block and none is left, the one admitted last is
// preempted: it loses its KV, waits in front of all others, and computes everything again.
//
// Units: tokens, and requests by their index. Thread-safety: none. Spans in a Sequence are borrowed for as long as
// it is here.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "policy/queue_order.h"
#include "sim/expert_union.h"
#include "sim/kv_pool.h"
#include "sim/step_time.h"

namespace kindred::sim {

struct EngineOptions {
  KvPoolOptions kv;
  uint32_t token_budget = 8192;
  uint32_t max_running = 256;
  policy::QueueOptions queue = {};
};

struct Sequence {
  uint32_t request = 0;
  uint32_t prompt_tokens = 0;             // >= 1
  uint32_t output_tokens = 1;             // >= 1
  uint32_t generated = 0;                 // of them, made elsewhere already
  bool fetches = false;                   // the prompt's KV comes from another worker
  bool hands_off = false;                 // goes elsewhere after its first token; its blocks stay until release()
  std::span<const uint64_t> pieces = {};  // of the prompt, whole ones, for the prefix cache
  const RequestExperts* experts = nullptr;
  int64_t arrival_ns = 0;  // on the clock of plan()'s `now_ns`
  int64_t priority = 0;    // policy::QueuedRequest::priority
};

struct Emitted {
  uint32_t request = 0, slot = 0;
  uint32_t generated = 0;
  bool finished = false;  // all it wanted; it is gone
  bool handed_off = false;
};

class Engine {
 public:
  explicit Engine(const EngineOptions& options) : options_(options), pool_(options.kv), waiting_(options.queue) {}

  // Returns its slot, valid until it is finished or released.
  uint32_t add(const Sequence& sequence);

  // Decides the next step. `shape` gets all but experts and ranks, `experts` the rows of who takes part, `fetches`
  // the slots that were admitted and wait for KV. `now_ns` matters to queue orders that look at waiting times.
  // False: there is nothing to run.
  bool plan(StepShape& shape, ExpertUnion& experts, std::vector<uint32_t>& fetches, int64_t now_ns = 0);
  // The planned step has run.
  void finish(std::vector<Emitted>& out);

  void fetched(uint32_t slot);  // its KV is here
  // Gone, wherever it was. One that runs: only between finish() and the next plan().
  void release(uint32_t slot);
  void clear();  // the worker died

  uint32_t request(uint32_t slot) const { return slots_[slot].sequence.request; }
  size_t running() const { return running_.size() + fetching_; }
  size_t waiting() const { return waiting_.size(); }
  // Of running sequences, what will be left to compute once the planned step has run: what is in a step can no longer
  // be helped, and nobody who comes now waits for it twice.
  uint64_t remaining_prefill_tokens() const;
  // Of waiting ones, less what the prefix cache held when they came.
  uint64_t waiting_prefill_tokens() const { return waiting_prefill_tokens_; }
  // visit(const RequestExperts&, prompt tokens, generated tokens) for each sequence that takes part in the planned
  // step.
  void for_each_planned(const auto& visit) const {
    for (const uint32_t at : running_) {
      const Slot& slot = slots_[at];
      if (slot.decodes || slot.chunk > 0) visit(*slot.sequence.experts, slot.chunk, slot.decodes ? 1U : 0U);
    }
  }
  // token(std::span<const uint64_t> row of its tape) and chunk(const expert::ExpertCounts& prompt, tokens), likewise.
  void for_each_planned_row(const auto& token, const auto& chunk) const {
    for (const uint32_t at : running_) {
      const Slot& slot = slots_[at];
      const RequestExperts& uses = *slot.sequence.experts;
      if (slot.decodes) token(uses.decode->token((uses.first + slot.sequence.generated - 1) % uses.decode->tokens()));
      if (slot.chunk > 0) chunk(*uses.prompt, slot.chunk);
    }
  }
  const KvPool& pool() const { return pool_; }
  KvPool& pool() { return pool_; }
  uint64_t preemptions() const { return preemptions_; }
  uint64_t prompt_tokens() const { return prompt_tokens_; }  // admitted, to be computed here
  uint64_t cached_tokens() const { return cached_tokens_; }  // of them, found in the cache

 private:
  enum class State { kFree, kWaiting, kFetching, kRunning, kLeased };
  struct Slot {
    Sequence sequence;
    State state = State::kFree;
    uint32_t context = 0;     // tokens whose KV is here
    uint32_t to_compute = 0;  // before it can decode
    uint32_t chunk = 0;       // of them, in the planned step
    bool decodes = false;     // in the planned step
    uint32_t shared = 0;      // pieces
    uint32_t blocks = 0;      // private
    uint64_t admitted = 0;    // order of admission
    uint64_t queued = 0;      // its name in the queue
    uint32_t waiting = 0;     // tokens that it counts for in waiting_prefill_tokens_
  };

  uint32_t cached_pieces(const Sequence& sequence) const;
  void enqueue(uint32_t at, bool preempted);
  void dequeue(uint32_t at);

  bool admit(uint32_t at);
  bool grow(uint32_t at);
  void preempt_last();
  void plan_decodes(StepShape& shape, ExpertUnion& experts, uint32_t& budget);
  void plan_chunk(uint32_t at, StepShape& shape, ExpertUnion& experts, uint32_t& budget);
  void publish(Slot& slot);
  void free_blocks(Slot& slot);
  void vacate(uint32_t at);

  EngineOptions options_;
  KvPool pool_;
  std::vector<Slot> slots_;
  std::vector<uint32_t> free_slots_;
  policy::QueueOrder waiting_;
  std::unordered_map<uint64_t, uint32_t> queued_;  // slots by their names in the queue
  uint64_t queue_names_ = 0, waiting_prefill_tokens_ = 0;
  std::vector<uint32_t> running_;  // in order of admission
  size_t fetching_ = 0;
  bool preempted_ = false;  // while planning
  uint64_t admissions_ = 0, preemptions_ = 0, prompt_tokens_ = 0, cached_tokens_ = 0;
};

}  // namespace kindred::sim
