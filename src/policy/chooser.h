// The load side that all policies share: who is available, who has the least, who wins a tie.
//
// Thread-safety: as the policy that owns it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/rng.h"
#include "policy/types.h"

namespace kindred::policy {

// Positions of the available workers, ascending.
std::vector<uint32_t> available_workers(std::span<const WorkerView> workers);

class Chooser {
 public:
  Chooser(TieBreak tie_break, uint64_t seed) : tie_break_(tie_break), rng_(seed) {}

  // The least loaded of `candidates` (positions, ascending, not empty).
  uint32_t least_loaded(std::span<const WorkerView> workers, std::span<const uint32_t> candidates);

  // The one of `candidates` whose last turn is the longest ago. A cursor would do as well while the candidates
  // stay the same; where they alternate (the bands of two domains), it would meet the same one each time.
  uint32_t next_in_turn(std::span<const uint32_t> candidates);
  // For choices that look at no load: a worker that starts slowly is passed over by chance, unless all are.
  uint32_t next_in_turn(std::span<const WorkerView> workers, std::span<const uint32_t> candidates);
  uint32_t at_random(std::span<const WorkerView> workers, std::span<const uint32_t> candidates);

  TieBreak tie_break() const { return tie_break_; }

  Rng& rng() { return rng_; }

 private:
  bool passes_over(const WorkerView& worker) { return worker.share < 1 && rng_.uniform() >= worker.share; }

  TieBreak tie_break_;
  Rng rng_;
  std::vector<uint64_t> turns_;  // by position in the worker list: when it last had its turn; 0: never
  uint64_t turn_ = 0;
};

}  // namespace kindred::policy
