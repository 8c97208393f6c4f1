// Prices what a decode worker would have to fetch: a worker that holds nothing of the conversation looks `weight`
// requests more loaded than one that holds it all, for whatever policy stands behind. 0 < weight; 1 means that the
// whole KV cache is worth waiting behind one more request. A weight far below 1 only breaks ties.
//
// Thread-safety: as the policy behind it.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "policy/decode_policy.h"

namespace kindred::policy {

// `workers` as they look then, in `priced`; `workers` itself without prompt_tokens, or if nobody holds anything.
std::span<const WorkerView> price_held(std::span<const WorkerView> workers, double prompt_tokens, double weight,
                                       std::vector<WorkerView>& priced);

class HeldPrice final : public DecodePolicy {
 public:
  HeldPrice(std::unique_ptr<DecodePolicy> policy, double weight) : policy_(std::move(policy)), weight_(weight) {}

  // Without prompt_tokens, or if nobody holds anything, as the policy behind it would.
  std::optional<Decision> choose(const DecodeSnapshot& snapshot, const DecodeRequest& request) override;
  std::string_view name() const override { return policy_->name(); }
  bool wants_counts() const override { return policy_->wants_counts(); }
  bool wants_expert_load() const override { return policy_->wants_expert_load(); }

 private:
  std::unique_ptr<DecodePolicy> policy_;
  double weight_;
  std::vector<WorkerView> priced_;  // scratch
};

}  // namespace kindred::policy
