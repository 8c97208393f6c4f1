// Which decode worker goes on with a request, decided at the handoff, when prefill has shown which
// experts the prompt uses.
//
// Policies: `round-robin`, `least-loaded` (JSQ), `power-of-two`, `random`, `locality-band` (ELDR; rules
// in policy/band.h), `domain` (by a label that the client gives; rules in policy/domain.h), `marginal-cost` (by what
// the request adds to each worker's steps; rules in policy/marginal_cost.h).
//
// Workers without a cohort (they joined while nothing fits cohorts anew) stand beside the locality band:
// such a worker gets a request only if it has less load than every worker of the band. So it takes what is
// too much for the others, and an idle fleet stays sorted by cohort. Only if no available worker has a
// cohort does load alone decide.
//
// Thread-safety: a policy keeps a cursor and a generator; use it from one thread, or under one lock.
// Equal seeds and equal sequences of calls give equal decisions. `choose` does not block and costs
// O(workers), and for locality-band O(workers x signature dimensions).
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/result.h"
#include "expert/cohorts.h"
#include "expert/counts.h"
#include "policy/types.h"

namespace kindred::policy {

struct DecodeSnapshot {
  std::span<const WorkerView> workers;
  const expert::CohortModel* cohorts = nullptr;  // borrowed; null: none loaded
};

struct DecodeRequest {
  const expert::ExpertCounts* counts = nullptr;  // borrowed; null: the prefill reply had none
  std::string_view model_fingerprint = {};       // of the prefill worker; empty: unknown, not compared
  double load = 1;                               // what the request adds to a worker's load, > 0; n for n choices
  std::string_view label = {};                   // the client's name for the request's domain; empty: none
  double prompt_tokens = 0;                      // counted or estimated; 0: not known
};

class DecodePolicy {
 public:
  virtual ~DecodePolicy() = default;
  // No value: no worker is available.
  virtual std::optional<Decision> choose(const DecodeSnapshot& snapshot, const DecodeRequest& request) = 0;
  virtual std::string_view name() const = 0;
  // Whether `choose` looks at counts and cohorts, so that callers need not prepare them for others.
  virtual bool wants_counts() const { return false; }
  // Whether it looks at what each worker's requests use (WorkerView::unused), so that this is kept.
  virtual bool wants_expert_load() const { return false; }
};

struct MarginalOptions {
  double cohort_weight = 0.15;  // kappa: mean steps that a cosine of 1 is worth; 0: cohorts play no part
  double sharpen = 1;           // power of the prompt's shares
  bool learned = true;          // step times and workers' speeds are what was observed, not the default law

  bool operator==(const MarginalOptions&) const = default;
};

struct DecodePolicyOptions {
  std::string name = "locality-band";
  double tau = 0.1;                  // locality-band: similarity a candidate may lose to the best, 0..2
  double load_cap = 1.25;            // locality-band, domain: multiple of the mean load, >= 1; 0 or inf: none
  double held_weight = 0;            // requests that a whole conversation's KV is worth (policy/held_price.h); 0: none
  std::string tie_break = "rotate";  // rotate | lowest-index | random
  uint64_t seed = 1;                 // of the generator behind random choices
  MarginalOptions marginal = {};     // marginal-cost
  bool shuffle_signatures = false;   // ablation: decide with another request's counts (policy/shuffled.h)

  bool operator==(const DecodePolicyOptions&) const = default;
};

// Error: kInvalid, naming the option and the accepted values.
Result<std::unique_ptr<DecodePolicy>> make_decode_policy(const DecodePolicyOptions& options);

std::span<const std::string_view> decode_policy_names();

}  // namespace kindred::policy
