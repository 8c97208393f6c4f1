#include "policy/kv_aware.h"

#include <algorithm>
#include <vector>

namespace kindred::policy {
namespace {

constexpr double kMeanStep = 0.01;

}  // namespace

std::optional<Decision> KvAware::choose(const PrefillSnapshot& snapshot, const PrefillRequest& request) {
  const std::span<const WorkerView> workers = snapshot.workers;
  Decision decision;
  decision.policy = kKvAwareName;
  decision.candidates = available_workers(workers);
  if (decision.candidates.empty()) return std::nullopt;
  if (!(request.prompt_tokens > 0)) {
    decision.reason = Reason::kEmptyKey;
    decision.worker = chooser_.least_loaded(workers, decision.candidates);
    return decision;
  }
  const double request_load = request.load > 0 ? request.load : 1;
  const double step = mean_load_ > 0 ? kMeanStep : 1;
  mean_tokens_ += step * (request.prompt_tokens - mean_tokens_);
  mean_load_ += step * (request_load - mean_load_);
  double sum = request_load;
  for (const uint32_t w : decision.candidates) sum += workers[w].load;
  const double limit = sum / static_cast<double>(decision.candidates.size()) * load_factor_;
  const auto cost = [&](uint32_t w) {
    return std::max(0.0, request.prompt_tokens - workers[w].held_tokens) + workers[w].load * mean_tokens_ / mean_load_;
  };
  std::vector<uint32_t> best;
  double least = 0;
  size_t eligible = 0;
  for (const uint32_t w : decision.candidates) {
    if (!(workers[w].load <= limit)) continue;
    ++eligible;
    const double of_w = cost(w);
    if (best.empty() || of_w < least) {
      best.clear();
      least = of_w;
    }
    if (of_w <= least) best.push_back(w);
  }
  if (best.empty()) best = decision.candidates;  // a load that is not a number
  decision.capped = static_cast<uint32_t>(decision.candidates.size() - std::min(eligible, decision.candidates.size()));
  decision.worker = chooser_.least_loaded(workers, best);
  decision.reason = workers[decision.worker].held_tokens > 0 ? Reason::kHeld : Reason::kLeastLoaded;
  decision.candidates = std::move(best);
  return decision;
}

}  // namespace kindred::policy
