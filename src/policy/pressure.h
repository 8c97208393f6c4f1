// Gimbal's Algorithm 1; the rules are in policy/engine_policy.h.
//
// Thread-safety: as EnginePolicy.
#pragma once

#include <vector>

#include "policy/chooser.h"
#include "policy/engine_policy.h"

namespace kindred::policy {

class PressurePolicy final : public EnginePolicy {
 public:
  PressurePolicy(const PressureOptions& options, Chooser chooser) : options_(options), chooser_(chooser) {}

  std::optional<Decision> choose(std::span<const EngineView> engines, const EngineRequest& request) override;
  std::string_view name() const override { return "pressure"; }

 private:
  // Of the available engines; false: a trace is late, or nobody has one.
  bool score(std::span<const EngineView> engines, const EngineRequest& request, Decision& decision);
  // The engine with the least KV in use, if that is what matters now.
  std::optional<uint32_t> emptiest(std::span<const EngineView> engines, std::span<const uint32_t> candidates) const;

  PressureOptions options_;
  Chooser chooser_;
  std::vector<double> scores_;  // scratch, per engine
};

}  // namespace kindred::policy
