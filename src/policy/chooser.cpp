#include "policy/chooser.h"

#include <algorithm>

#include "base/result.h"

namespace kindred::policy {

std::vector<uint32_t> available_workers(std::span<const WorkerView> workers) {
  std::vector<uint32_t> out;
  out.reserve(workers.size());
  for (uint32_t w = 0; w < workers.size(); ++w) {
    if (workers[w].available) out.push_back(w);
  }
  return out;
}

uint32_t Chooser::least_loaded(std::span<const WorkerView> workers, std::span<const uint32_t> candidates) {
  KINDRED_CHECK(!candidates.empty());
  double least = workers[candidates.front()].load;
  for (const uint32_t w : candidates) least = std::min(least, workers[w].load);
  std::vector<uint32_t> tied;
  for (const uint32_t w : candidates) {
    if (workers[w].load <= least) tied.push_back(w);
  }
  if (tied.empty()) return candidates.front();  // a load that is not a number
  switch (tie_break_) {
    case TieBreak::kLowestIndex: break;
    case TieBreak::kRotate: return next_in_turn(tied);
    case TieBreak::kRandom: return tied[rng_.below(tied.size())];
  }
  return tied.front();
}

uint32_t Chooser::next_in_turn(std::span<const uint32_t> candidates) {
  KINDRED_CHECK(!candidates.empty());
  const auto at = std::lower_bound(candidates.begin(), candidates.end(), cursor_);
  const uint32_t chosen = at == candidates.end() ? candidates.front() : *at;
  cursor_ = chosen + 1;
  return chosen;
}

}  // namespace kindred::policy
