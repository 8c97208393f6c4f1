#include "policy/shuffled.h"

#include <utility>

namespace kindred::policy {

std::optional<Decision> ShuffledSignatures::choose(const DecodeSnapshot& snapshot, const DecodeRequest& request) {
  if (request.counts == nullptr) return policy_->choose(snapshot, request);
  DecodeRequest shuffled = request;
  if (kept_.size() < kKept) {
    kept_.push_back(*request.counts);
    shuffled.counts = nullptr;
    return policy_->choose(snapshot, shuffled);
  }
  const expert::ExpertCounts other = std::exchange(kept_[rng_.below(kKept)], *request.counts);
  shuffled.counts = &other;
  return policy_->choose(snapshot, shuffled);
}

}  // namespace kindred::policy
