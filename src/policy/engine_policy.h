// Which engine gets a request: one data-parallel rank of one worker (Gimbal's upper level).
//
// `pressure` is Gimbal's Algorithm 1 with design.md §6's formula, all in tokens:
//   score = R + W + C + kv_weight * kv + expert_weight * max(0, x / mean x - 1) + own
// R, W: prefill tokens left and waiting, kv: share of KV in use, x: expert pressure, all from the engine's latest
// trace; C: prompt tokens sent there since that trace; own: what of this request's prompt the engine would have to
// compute, which matters only where caches differ.
//  1. An engine whose trace is late, but was there a moment ago: ordered dispatch. One that has been without for
//     longer counts as the mean of the others (or its own C, if that is more): unknown is not zero, and one engine
//     that says nothing must not blind the choice among the others. Nobody has a trace: ordered dispatch.
//  2. The fullest KV is above kv_high and kv_gap above the emptiest: the emptiest.
//  3. Else the lowest score; engines within max(epsilon_tokens, epsilon_share * mean score) of it take turns.
//
// The others are what is in use elsewhere, to compare with:
//   round-robin, request-count  this router's own requests in flight
//   vllm-0.21    4 waiting + running, of the trace; what was sent since adds `clients` to waiting
//   vllm-0.27    max(clients * own in flight, waiting + running), and 6 waiting max(0, kv - 0.5) where any wait
//   total-tokens SGLang: tokens in KV and waiting, then requests; what was sent since adds its prompt and one
//   least-load   smg: (waiting + running) / throughput + lambda k / (1 - k), k: share of KV in use
//   replay       Sem-MoE's oracle: the engine that was assigned beforehand; request-count without one
// Where an engine's trace is unknown these read this router's own ledger in its place.
//
// Thread-safety: a policy keeps turns; use it from one thread, or under one lock. Equal seeds and equal sequences of
// calls give equal decisions. `choose` does not block and costs O(engines).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "policy/types.h"

namespace kindred::policy {

enum class TraceState {
  kFresh,
  kLate,     // too old, but not for long
  kUnknown,  // there was none for long, or never
};
std::string_view to_string(TraceState state);

// One engine, as the fleet sees it at this moment.
struct EngineView {
  bool available = true;  // false: its worker is dead, draining or unsuitable; never chosen
  double share = 1;       // as WorkerView::share
  TraceState trace = TraceState::kUnknown;
  // Of the trace; 0 and meaningless unless it is fresh.
  double remaining_prefill_tokens = 0, waiting_prefill_tokens = 0;
  double running = 0, waiting = 0;  // requests
  double kv_usage = 0;              // 0..1
  double kv_used_tokens = 0;        // 0 where the engine does not say how much KV it has
  double expert_pressure = 0;       // token equivalents; 0 where nothing is known
  // Of this router's ledger.
  double in_flight = 0;            // requests
  double unseen = 0;               // of them, those the trace does not include
  double compensation_tokens = 0;  // prompt tokens of the unseen that had to be computed
  double throughput = 0;           // requests a second that ended there lately; 0: unknown
  // Of this request.
  double held_tokens = 0;  // of its prompt, in the cache of the engine's worker
};

struct EngineRequest {
  double prompt_tokens = 0;  // counted or estimated
  int32_t assigned = -1;     // replay: position of the engine; -1: none
};

struct PressureOptions {
  double kv_high = 0.9, kv_gap = 0.1;  // shares of KV, (0, 1]
  double kv_weight = 4096;             // tokens that a full KV cache is worth, >= 0
  double expert_weight = 2048;         // tokens per multiple of the mean expert pressure, >= 0
  double epsilon_tokens = 128;         // >= 0
  double epsilon_share = 0.05;         // of the mean score, 0..1
  // Ablation: which terms count.
  bool remaining = true, waiting = true, compensation = true, kv = true, experts = true, held = true;

  bool operator==(const PressureOptions&) const = default;
};

// What an engine's score consists of; tokens.
struct Pressure {
  double remaining = 0, waiting = 0, compensation = 0, kv = 0, experts = 0;
  double score() const { return remaining + waiting + compensation + kv + experts; }
};
// `mean_expert_pressure` over the engines that are compared; 0: none is known.
Pressure pressure_of(const EngineView& engine, double mean_expert_pressure, const PressureOptions& options);
// Over the available engines with a fresh trace.
double mean_expert_pressure(std::span<const EngineView> engines);

class EnginePolicy {
 public:
  virtual ~EnginePolicy() = default;
  // Decision::worker and ::candidates are positions in `engines`; `scores`: per engine, in the policy's own unit,
  // NaN where it has none; empty where it needed none. No value: no engine is available.
  virtual std::optional<Decision> choose(std::span<const EngineView> engines, const EngineRequest& request) = 0;
  virtual std::string_view name() const = 0;
};

struct EnginePolicyOptions {
  std::string name = "pressure";
  PressureOptions pressure = {};
  double clients = 1;                // vllm-*: front ends that share the engines, >= 1
  double kv_lambda = 1;              // least-load: seconds that k / (1 - k) = 1 is worth, >= 0
  std::string tie_break = "rotate";  // rotate | lowest-index | random
  uint64_t seed = 1;

  bool operator==(const EnginePolicyOptions&) const = default;
};

// Error: kInvalid, naming the option and the accepted values.
Result<std::unique_ptr<EnginePolicy>> make_engine_policy(const EnginePolicyOptions& options);

std::span<const std::string_view> engine_policy_names();

}  // namespace kindred::policy
