// An ablation: decides with the expert counts of some earlier request instead of the request's own. Signatures
// keep their distribution and lose their meaning, so whatever a policy gains from them must vanish.
//
// Thread-safety: as DecodePolicy.
#pragma once

#include <memory>
#include <vector>

#include "base/rng.h"
#include "policy/decode_policy.h"

namespace kindred::policy {

class ShuffledSignatures final : public DecodePolicy {
 public:
  ShuffledSignatures(std::unique_ptr<DecodePolicy> policy, uint64_t seed) : policy_(std::move(policy)), rng_(seed) {}

  // Until kKept requests have been seen, there is nothing to take from: decided without counts.
  std::optional<Decision> choose(const DecodeSnapshot& snapshot, const DecodeRequest& request) override;
  std::string_view name() const override { return policy_->name(); }
  bool wants_counts() const override { return policy_->wants_counts(); }
  bool wants_expert_load() const override { return policy_->wants_expert_load(); }

  static constexpr size_t kKept = 16;

 private:
  std::unique_ptr<DecodePolicy> policy_;
  Rng rng_;
  std::vector<expert::ExpertCounts> kept_;
};

}  // namespace kindred::policy
