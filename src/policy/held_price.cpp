#include "policy/held_price.h"

#include <algorithm>

namespace kindred::policy {

std::optional<Decision> HeldPrice::choose(const DecodeSnapshot& snapshot, const DecodeRequest& request) {
  const auto holds = [](const WorkerView& worker) { return worker.held_tokens > 0; };
  if (!(request.prompt_tokens > 0) || std::ranges::none_of(snapshot.workers, holds)) {
    return policy_->choose(snapshot, request);
  }
  priced_.assign(snapshot.workers.begin(), snapshot.workers.end());
  for (WorkerView& worker : priced_) {
    const double more = weight_ * (1 - std::min(1.0, worker.held_tokens / request.prompt_tokens));
    worker.load += more;
    worker.requests += more;
  }
  DecodeSnapshot priced = snapshot;
  priced.workers = priced_;
  return policy_->choose(priced, request);
}

}  // namespace kindred::policy
