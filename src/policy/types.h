// What every routing policy reads and returns. A policy is a function of a snapshot and a request (and
// of its own cursor or generator): it takes no locks, reads no clock, and the router and the simulator
// run the same object code.
//
// Thread-safety: plain values.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "expert/inclusion.h"
#include "expert/rank_union.h"
#include "policy/step_law.h"

namespace kindred::policy {

// One worker of the role that is being chosen, as the fleet sees it at this moment. The views are the
// caller's and need to live only during `choose`.
struct WorkerView {
  std::string_view url = {};  // identity on the consistent ring of `prefix-hash`
  double load = 0;            // in the unit the caller balances: in-flight requests unless it says otherwise
  bool available = true;      // false: dead, draining or unsuitable; never chosen
  int32_t cohort = -1;        // row of the cohort model that belongs to this worker; -1: none
  // In (0, 1]: below 1 while the worker starts slowly, as a part of what the others get. `load` is raised
  // accordingly already; policies that do not look at load pass such a worker over with this chance.
  double share = 1;
  double held_tokens = 0;  // of the request's prompt, from its start, that the worker has in its cache

  // For policies that ask for it (DecodePolicy::wants_expert_load).
  double requests = 0;  // in flight; raised like `load` while the worker starts slowly
  std::span<const float> unused =
      {};           // [L, E]: how likely each expert is unused in a step; empty: nobody known is there
  double used = 0;  // expected distinct experts in a step, of all layers together; with ranks, of each layer's busiest
  const expert::RankMap* ranks = nullptr;  // of expert parallelism, where each expert is now; null: none
  StepLaw law = {};
  double slowness = 1;  // of its steps, against what `law` says
};

// Who wins among equals. kRotate keeps a cursor, so that an idle fleet does not send everything to
// worker 0; kLowestIndex is what the published band does.
enum class TieBreak { kLowestIndex, kRotate, kRandom };

// Why a decision was made on load alone though the policy wanted more. Never an error: each has a
// counter in the metrics, labelled with to_string().
enum class FallbackReason {
  kNone,
  kNoCounts,              // the prefill reply had no expert counts
  kNoCohorts,             // no cohort file is loaded
  kOtherModel,            // the cohorts were fitted for another model fingerprint
  kShapeMismatch,         // layers, experts or top_k differ from the cohorts'
  kZeroSignature,         // no expert of the kept layers tells this prompt apart
  kCohortWorkerMismatch,  // no available worker has a cohort
  kNoGates,               // the cohorts were fitted on gate sums, which the prefill reply does not carry
  kNoLabel,               // domain: the request carries no label
  kTooManyLabels,         // domain: a label beyond those that are remembered
  kNoTrace,               // pressure: an engine's trace is late, or no engine has one
};
inline constexpr size_t kFallbackReasons = 11;

// What settled the choice.
enum class Reason {
  kRoundRobin,
  kRandom,
  kPowerOfTwo,
  kLeastLoaded,
  kBand,      // least loaded of the locality band
  kNoCohort,  // locality-band: a worker without a cohort had less load than the whole band
  kDomain,    // domain: the label's own worker
  kRing,      // prefix-hash: the key's owner on the ring
  kSpill,     // prefix-hash, domain: the owner is over the load bound; least loaded instead
  kEmptyKey,  // prefix-hash, kv-aware: no prompt to go by; least loaded instead
  kHeld,      // kv-aware: least cost, and it holds some of the prompt
  kPressure,  // pressure: the lowest score by far
  kOrdered,   // pressure: in turn, among engines whose scores are close or not known
  kLowestKv,  // pressure: the KV of another engine is nearly full
  kAssigned,  // replay: as it was assigned beforehand
  kMarginal,  // marginal-cost: costs least
};

std::string_view to_string(TieBreak tie_break);
// Error: kInvalid, naming the accepted values.
Result<TieBreak> parse_tie_break(std::string_view name);
std::string_view to_string(FallbackReason reason);  // "none", "no_counts", ...
std::string_view to_string(Reason reason);

// The score of a worker without a cohort: the least a cosine can be.
inline constexpr float kNoScore = -1.0F;

// Indices are positions in the snapshot's worker list.
struct Decision {
  size_t worker = 0;
  std::string_view policy;  // static name, e.g. "locality-band"
  Reason reason = Reason::kLeastLoaded;
  FallbackReason fallback = FallbackReason::kNone;
  std::vector<uint32_t> candidates;   // ascending; those the load (or cursor, or dice) chose between
  std::vector<float> scores;          // per worker: cosine to its cohort, or kNoScore; empty when none was computed
  std::optional<size_t> shadow = {};  // what a policy that does not act would have chosen (policy/shadow.h)
  uint32_t capped = 0;                // available workers left out because they were over the load cap
  // What the request is expected to use, for who keeps each worker's expert load; null: the policy asked for none.
  std::shared_ptr<const expert::Inclusion> inclusion = {};
};

}  // namespace kindred::policy
