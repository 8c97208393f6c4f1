// The solvers one by one; solve.h chooses among them. Each expects a problem that has been checked.
#pragma once

#include "place/solve.h"

namespace kindred::place {

Placement place_linear(const Problem& problem);
Placement place_round_robin(const Problem& problem);
Placement place_greedy(const Problem& problem);
Placement place_moetuner(const Problem& problem);
Placement place_sem_moe(const Problem& problem);
Result<Solution> place_exact(const Problem& problem, const SolveOptions& options);
Result<Solution> place_flow(const Problem& problem);

// Fills the redundant slots of a layer: the expert with the most load per copy gets the next one, on the rank with
// least load that has room and does not hold it. `rank` [E] leaves every rank at most problem.slots() experts.
// Appends to `copies`.
void copy_by_load(const Problem& problem, size_t layer, std::span<const uint32_t> rank, std::vector<Copy>& copies);

}  // namespace kindred::place
