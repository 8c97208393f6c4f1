// Prefill where it costs least: each worker's cost is what it would have to compute of this prompt, plus what it
// has to do already, both in tokens,
//   cost = prompt tokens - tokens it holds + load x mean prompt tokens / mean load of the last requests,
// whatever the unit of load is.
// Whoever has more than `load_factor` times the mean load (this request included) is left out, so that a popular
// prefix does not pile up on one worker. Equal costs are settled as loads are.
//
// Thread-safety: none. Equal sequences of calls give equal decisions. O(workers).
#pragma once

#include <optional>
#include <string_view>

#include "policy/chooser.h"
#include "policy/prefill_policy.h"

namespace kindred::policy {

inline constexpr std::string_view kKvAwareName = "kv-aware";

class KvAware final : public PrefillPolicy {
 public:
  KvAware(Chooser chooser, double load_factor) : chooser_(chooser), load_factor_(load_factor) {}

  std::optional<Decision> choose(const PrefillSnapshot& snapshot, const PrefillRequest& request) override;
  std::string_view name() const override { return kKvAwareName; }
  bool wants_prefix() const override { return true; }

 private:
  Chooser chooser_;
  double load_factor_;
  double mean_tokens_ = 0, mean_load_ = 0;  // of requests, the last 100 or so
};

}  // namespace kindred::policy
