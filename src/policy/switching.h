// Policies that stand for several and pass each request to the one in force.
//
// Thread-safety: as the policies behind them; `in_force` is asked at each decision.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#include "policy/decode_policy.h"
#include "policy/prefill_policy.h"

namespace kindred::policy {

using InForce = std::function<size_t()>;  // a position among the policies

class SwitchingDecode final : public DecodePolicy {
 public:
  SwitchingDecode(std::vector<std::unique_ptr<DecodePolicy>> policies, InForce in_force)
      : policies_(std::move(policies)), in_force_(std::move(in_force)) {}

  std::optional<Decision> choose(const DecodeSnapshot& snapshot, const DecodeRequest& request) override {
    std::optional<Decision> decision = now().choose(snapshot, request);
    // One that looks at what workers' requests use must know those of other policies' slices, too.
    if (decision && !decision->inclusion && wants_expert_load() && request.counts != nullptr &&
        request.counts->tokens > 0) {
      decision->inclusion = std::make_shared<const expert::Inclusion>(expert::pack_inclusion(*request.counts));
    }
    return decision;
  }
  std::string_view name() const override { return now().name(); }
  // Whether any does: what is prepared for one is prepared for all, so that none pays for it alone.
  bool wants_counts() const override {
    return std::ranges::any_of(policies_, [](const auto& policy) { return policy->wants_counts(); });
  }
  bool wants_expert_load() const override {
    return std::ranges::any_of(policies_, [](const auto& policy) { return policy->wants_expert_load(); });
  }

 private:
  DecodePolicy& now() const { return *policies_[in_force_()]; }

  std::vector<std::unique_ptr<DecodePolicy>> policies_;
  InForce in_force_;
};

class SwitchingPrefill final : public PrefillPolicy {
 public:
  SwitchingPrefill(std::vector<std::unique_ptr<PrefillPolicy>> policies, InForce in_force)
      : policies_(std::move(policies)), in_force_(std::move(in_force)) {}

  std::optional<Decision> choose(const PrefillSnapshot& snapshot, const PrefillRequest& request) override {
    return now().choose(snapshot, request);
  }
  std::string_view name() const override { return now().name(); }
  bool wants_prefix() const override {
    return std::ranges::any_of(policies_, [](const auto& policy) { return policy->wants_prefix(); });
  }

 private:
  PrefillPolicy& now() const { return *policies_[in_force_()]; }

  std::vector<std::unique_ptr<PrefillPolicy>> policies_;
  InForce in_force_;
};

}  // namespace kindred::policy
