// A policy in another's shadow: it decides on the same snapshots, and nobody does as it says. What it would have
// chosen goes into the decision, and to `on_shadow`.
//
// Thread-safety: as the policies behind it.
#pragma once

#include <functional>
#include <memory>

#include "base/clock.h"
#include "policy/decode_policy.h"

namespace kindred::policy {

struct ShadowVerdict {
  bool agreed = false;
  double took_s = 0;  // its decision alone
};

class ShadowedDecode final : public DecodePolicy {
 public:
  // `clock` is borrowed.
  ShadowedDecode(std::unique_ptr<DecodePolicy> acting, std::unique_ptr<DecodePolicy> shadow, const Clock& clock,
                 std::function<void(const ShadowVerdict&)> on_shadow)
      : acting_(std::move(acting)), shadow_(std::move(shadow)), clock_(clock), on_shadow_(std::move(on_shadow)) {}

  std::optional<Decision> choose(const DecodeSnapshot& snapshot, const DecodeRequest& request) override {
    std::optional<Decision> decision = acting_->choose(snapshot, request);
    if (!decision) return decision;
    const MonotonicTime begun = clock_.now();
    const std::optional<Decision> other = shadow_->choose(snapshot, request);
    const double took_s = seconds_between(begun, clock_.now());
    if (!other) return decision;
    decision->shadow = other->worker;
    // A shadow that looks at what workers' requests use must see those that others have sent there.
    if (!decision->inclusion) decision->inclusion = other->inclusion;
    on_shadow_({.agreed = other->worker == decision->worker, .took_s = took_s});
    return decision;
  }
  std::string_view name() const override { return acting_->name(); }
  bool wants_counts() const override { return acting_->wants_counts() || shadow_->wants_counts(); }
  bool wants_expert_load() const override { return acting_->wants_expert_load() || shadow_->wants_expert_load(); }

 private:
  std::unique_ptr<DecodePolicy> acting_, shadow_;
  const Clock& clock_;
  std::function<void(const ShadowVerdict&)> on_shadow_;
};

}  // namespace kindred::policy
