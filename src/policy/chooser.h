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

  // The first of `candidates` at or behind the cursor, which moves past it.
  uint32_t next_in_turn(std::span<const uint32_t> candidates);

  Rng& rng() { return rng_; }

 private:
  TieBreak tie_break_;
  Rng rng_;
  uint32_t cursor_ = 0;  // a position in the worker list
};

}  // namespace kindred::policy
