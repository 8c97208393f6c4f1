#include "policy/held_price.h"

#include <algorithm>

namespace kindred::policy {

std::span<const WorkerView> price_held(std::span<const WorkerView> workers, double prompt_tokens, double weight,
                                       std::vector<WorkerView>& priced) {
  const auto holds = [](const WorkerView& worker) { return worker.held_tokens > 0; };
  if (!(prompt_tokens > 0) || std::ranges::none_of(workers, holds)) return workers;
  priced.assign(workers.begin(), workers.end());
  for (WorkerView& worker : priced) {
    const double more = weight * (1 - std::min(1.0, worker.held_tokens / prompt_tokens));
    worker.load += more;
    worker.requests += more;
  }
  return priced;
}

std::optional<Decision> HeldPrice::choose(const DecodeSnapshot& snapshot, const DecodeRequest& request) {
  DecodeSnapshot priced = snapshot;
  priced.workers = price_held(snapshot.workers, request.prompt_tokens, weight_, priced_);
  return policy_->choose(priced, request);
}

}  // namespace kindred::policy
