// Why experts move: for people who want to see it before they believe it.
//
// Thread-safety: pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "place/problem.h"

namespace kindred::place {

struct MoveReason {
  uint32_t layer = 0, expert = 0;
  uint32_t from = 0, to = 0;  // of a new copy: `from` is the first old holder
  bool copy = false;          // the old holders keep it
  double tokens = 0;          // of the expert
  uint32_t main_source = 0;   // that sends it most
  double main_tokens = 0;
  double saved_communication = 0;  // of all the expert's moves: tokens * distance; negative: it costs
  // Loads over the mean of the layer: of the rank it leaves, before; of the rank it goes to, after.
  double from_load = 1, to_load = 1;
};

// Moves from problem.old to `placement`, those that save most communication first, then the heaviest. At most
// `most`. Empty if nothing was placed before.
std::vector<MoveReason> explain_moves(const Problem& problem, const Placement& placement, size_t most);

// One sentence. `source_name`: of the main source, or empty.
std::string to_sentence(const MoveReason& move, const std::string& source_name);

}  // namespace kindred::place
