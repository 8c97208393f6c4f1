// Which prefill worker (or, without PD disaggregation, which worker) gets a request.
//
// Policies: `prefix-hash` (consistent ring over the key's first bytes, with bounded load),
// `least-loaded`, `round-robin`.
//
// Thread-safety: a policy keeps a cursor and a ring; use it from one thread, or under one lock. Equal
// seeds and equal sequences of calls give equal decisions. `choose` does not block; it costs O(workers),
// and prefix-hash rebuilds its ring when the list of URLs has changed.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/result.h"
#include "policy/types.h"

namespace kindred::policy {

struct PrefillSnapshot {
  std::span<const WorkerView> workers;
};

struct PrefillRequest {
  std::string_view key = {};  // raw bytes of `prompt` or `messages`, as the client sent them; may be empty
};

class PrefillPolicy {
 public:
  virtual ~PrefillPolicy() = default;
  // No value: no worker is available.
  virtual std::optional<Decision> choose(const PrefillSnapshot& snapshot, const PrefillRequest& request) = 0;
  virtual std::string_view name() const = 0;
};

struct PrefillPolicyOptions {
  std::string name = "prefix-hash";
  uint32_t prefix_bytes = 1024;      // prefix-hash: only so much of the key is hashed, > 0
  double load_factor = 1.25;         // prefix-hash: multiple of the mean load the ring's worker may have, >= 1
  uint32_t vnodes = 160;             // prefix-hash: ring points per worker, 1..4096
  std::string tie_break = "rotate";  // rotate | lowest-index | random
  uint64_t seed = 1;

  bool operator==(const PrefillPolicyOptions&) const = default;
};

// Error: kInvalid, naming the option and the accepted values.
Result<std::unique_ptr<PrefillPolicy>> make_prefill_policy(const PrefillPolicyOptions& options);

std::span<const std::string_view> prefill_policy_names();

}  // namespace kindred::policy
