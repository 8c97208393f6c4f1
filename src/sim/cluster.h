// A cluster under a simulated clock: workers that batch, cache, preempt and hand over KV, and a router in front of
// them that decides with the production policies (sim/dispatch.h).
//
// A request: arrival, prefill decision, prefill in chunks, first token, decode decision (with the expert counts
// that prefill reports), a place and KV blocks at the decode worker, the KV's way there, a token a step, end. The
// KV stays at the prefill worker until decode has made a token, so that another decode worker may take over.
// Without prefill and decode workers, a worker of role kBoth does it all.
//
// Time of a step: of the slowest engine of the worker, since data-parallel engines whose experts are spread over
// common ranks go in lockstep: each layer's all-to-all waits for all of them. The experts of a layer are then those
// of all its engines' tokens, and of the rank that has the most to read. Without expert parallelism engines are
// replicas, each with all experts on a GPU of its own, as `kindred worker --data-parallel-size` has them: they step
// apart (WorkerGroup::lockstep), and each step is that of one engine. Gimbal's set-up, DP 2 x EP 4, is in lockstep.
// Tensor parallelism within an engine is a matter of its cost (sim/tensor_parallel.h).
// With WorkerGroup::expert_parallel the copies of tokens are counted rank by rank under a placement (sim/rank_flow.h),
// each layer waits for its slowest rank and its busiest link, and experts may move (sim/placement_control.h): the whole
// worker stands still meanwhile. Else ranks have as many copies each, and experts stay.
//
// Traces. With an engine policy, or where load is pressure, each engine pushes a trace when something has changed, at
// most every `trace_ms`, and once a second in any case; it reaches all routers `trace_delay_ms` later. A worker whose
// engines nobody chooses among gives each request to the engine with the fewest.
// KV transfers take turns on each worker's way out and on each worker's way in, first come first served.
//
// Determinism: equal inputs give equal results on any machine; times are whole nanoseconds.
// Thread-safety: a run is a function of its arguments; runs may go side by side.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "base/role.h"
#include "sim/dispatch.h"
#include "sim/engine.h"
#include "sim/expert_union.h"
#include "sim/placement_control.h"
#include "sim/step_cost.h"
#include "sim/tape.h"

namespace kindred::sim {

// Exact accounts of a worker's expert ranks.
struct ExpertParallel {
  std::shared_ptr<const place::Placement> at_first = nullptr;  // without copies; null: linear
  std::optional<PlacementControlOptions> control = {};         // none: experts stay
  bool feedback = true;  // false: engines' traces say nothing of their ranks (Gimbal's "no collaboration")
};

// Workers that are alike.
struct WorkerGroup {
  std::string name;  // for people: "h200"
  Role role = Role::kBoth;
  uint32_t count = 1;
  std::shared_ptr<const StepCost> cost;                    // not null
  uint32_t engines = 1;                                    // data-parallel, each with a KV cache of its own
  bool lockstep = true;                                    // false: only with one rank
  uint32_t ranks = 1;                                      // of expert parallelism
  std::shared_ptr<const ExpertRanks> placement = nullptr;  // null: linear; not with expert_parallel
  std::optional<ExpertParallel> expert_parallel = {};      // several ranks, lockstep
  EngineOptions engine = {};                               // of each engine; kv.blocks > 0
};

enum class ScriptKind { kJoin, kLeave, kFail };  // a worker that joins was not there from the start, or had failed
struct ScriptEvent {
  double at_s = 0;
  ScriptKind kind = ScriptKind::kFail;
  uint32_t worker = 0;  // counted through all groups
};

// Traces that do not arrive.
struct TraceLoss {
  double from_s = 0, until_s = 0;
  uint32_t worker = 0, engine = 0;
};

struct ClusterOptions {
  std::vector<WorkerGroup> groups;
  DispatchOptions router;
  std::vector<ScriptEvent> script = {};
  // Each sees all that workers say of themselves, and of what is in flight only its own. Requests go to them in turn.
  uint32_t routers = 1;
  uint32_t retries = 2;     // of each leg, as the router's --retries
  int64_t poll_ms = 1000;   // between two looks at workers' load, where policies read polled load
  int64_t probe_ms = 1000;  // between two health checks
  int64_t trace_ms = 20;    // between two traces of an engine, at least
  int64_t trace_delay_ms = 1;
  std::vector<TraceLoss> trace_losses = {};
  bool engine_series = false;                       // EngineReport::prompt_tokens_by_s
  size_t step_records = 0;                          // at most so many are kept for SimResult::steps
  std::function<void(size_t ended)> on_ended = {};  // for a progress bar; rarely
};

// An engine of a worker, both counted from 0; workers through all groups.
struct EnginePlace {
  uint32_t worker = 0, engine = 0;
};

struct SimRequest {
  double arrival_s = 0;  // ascending
  uint32_t prompt_tokens = 1;
  uint32_t output_tokens = 1;
  std::vector<uint64_t> blocks = {};  // of the prompt by content, as in TraceRequest
  RequestExperts experts;
  std::string label = {};
  int64_t priority = 0;                    // policy::QueuedRequest::priority
  int32_t assigned = -1;                   // policy::EngineRequest::assigned
  std::optional<EnginePlace> direct = {};  // its client goes there and asks no router; only workers of kBoth
};

enum class Ended {
  kOk,
  kNoWorker,    // nobody (left) to send it to
  kRoomFull,    // all decode workers full: refused before its prefill
  kWorkerLost,  // its worker failed, and it could not be made whole
};
std::string_view to_string(Ended ended);
inline constexpr uint32_t kNobody = UINT32_MAX;

struct RequestRecord {
  int64_t arrival_ns = 0, first_ns = 0, last_ns = 0;  // of its first and its last token
  int64_t handed_ns = 0, fetched_ns = 0;              // decode worker chosen; KV there
  uint32_t prompt_tokens = 0, output_tokens = 0;
  uint32_t generated = 0;
  uint32_t prefill_worker = kNobody, decode_worker = kNobody;
  uint32_t engine = kNobody;  // of the worker that computes its prompt
  uint32_t domain = 0;
  uint32_t retries = 0;
  Ended ended = Ended::kOk;

  double ttft_s() const { return static_cast<double>(first_ns - arrival_ns) * 1e-9; }
  // Of outputs longer than one token.
  double tpot_s() const { return static_cast<double>(last_ns - first_ns) * 1e-9 / (output_tokens - 1); }
};

struct EngineReport {
  uint64_t prefill_tokens = 0;  // computed
  double running_s = 0;         // running requests, times seconds
  double kv_share_s = 0;
  std::vector<uint32_t> prompt_tokens_by_s;  // prefill tokens of the steps that ended in each second
};

// Copies of tokens: (token, expert) pairs, summed over layers and steps.
struct ExpertReport {
  double copies = 0, remote_copies = 0;  // the latter go to another engine's ranks
  double busiest_copies = 0;             // of the rank that had the most in each layer and step
  uint64_t migrations = 0, moved_experts = 0;
  double stalled_s = 0;

  double remote_share() const { return copies > 0 ? remote_copies / copies : 0; }
  double max_over_mean(uint32_t ranks) const { return copies > 0 ? busiest_copies * ranks / copies : 1; }
};

struct WorkerReport {
  std::string name;
  Role role = Role::kBoth;
  uint64_t steps = 0, decode_steps = 0;           // decode_steps: with decode tokens only
  double busy_s = 0, decode_s = 0;                // engines apart: their mean
  uint64_t decode_tokens = 0;                     // of decode steps: their batches, summed
  uint64_t all_decode_tokens = 0;                 // of all steps
  uint64_t prefill_tokens = 0;                    // computed
  uint64_t prompt_tokens = 0, cached_tokens = 0;  // admitted; found in the prefix cache
  double expert_reads = 0;      // of decode steps: distinct experts a layer (mean over layers), summed over steps
  double worst_rank_reads = 0;  // the same, of the rank with the most
  uint64_t preemptions = 0;
  double kv_share_s = 0;        // share of blocks used, times seconds
  double kv_peak = 0;           // highest share
  double here_s = 0;            // alive
  uint32_t kv_left_blocks = 0;  // at the end: 0 unless something leaks
  std::vector<EngineReport> engines;
  ExpertReport experts;  // with WorkerGroup::expert_parallel
};

struct StepRecord {
  uint32_t worker = 0;
  int64_t begin_ns = 0, end_ns = 0;
  uint32_t prefill_tokens = 0, decode_requests = 0;
  float experts = 0;  // a layer
};

struct SimResult {
  std::vector<RequestRecord> requests;  // in the order given
  std::vector<WorkerReport> workers;    // counted through all groups
  std::vector<StepRecord> steps;
  std::vector<uint64_t> fallbacks;  // by policy::FallbackReason
  double end_s = 0;                 // of the last event that changed something
  uint64_t steps_run = 0, events = 0;
  uint64_t traces = 0;              // that reached the first router
  int64_t ledger_left = 0;          // requests in flight at the end: 0 unless something leaks
  int64_t engine_ledgers_left = 0;  // what engines' ledgers still count, request or token: 0 unless something leaks
};

// Error: kInvalid: nothing to run; requests out of order, or too large for a worker that might get them; groups
// that contradict each other; a tape of another model; what the policies refuse.
Result<SimResult> run_cluster(const ClusterOptions& options, std::span<const SimRequest> requests);

}  // namespace kindred::sim
