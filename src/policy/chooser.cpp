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
  if (turns_.size() <= candidates.back()) turns_.resize(candidates.back() + 1, 0);
  const uint32_t chosen = *std::ranges::min_element(candidates, {}, [&](uint32_t w) { return turns_[w]; });
  turns_[chosen] = ++turn_;
  return chosen;
}

uint32_t Chooser::next_in_turn(std::span<const WorkerView> workers, std::span<const uint32_t> candidates) {
  uint32_t chosen = next_in_turn(candidates);
  for (size_t tries = 1; tries < candidates.size() && passes_over(workers[chosen]); ++tries) {
    chosen = next_in_turn(candidates);
  }
  return chosen;
}

uint32_t Chooser::at_random(std::span<const WorkerView> workers, std::span<const uint32_t> candidates) {
  KINDRED_CHECK(!candidates.empty());
  uint32_t chosen = candidates[rng_.below(candidates.size())];
  for (size_t tries = 1; tries < candidates.size() && passes_over(workers[chosen]); ++tries) {
    chosen = candidates[rng_.below(candidates.size())];
  }
  return chosen;
}

}  // namespace kindred::policy
