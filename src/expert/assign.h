// Exact assignment of many rows to few columns with a capacity per column.
//
// Every row starts in its cheapest column, which is optimal but for the capacities; overfull columns
// are then drained row by row along shortest paths in the residual graph, whose nodes are the K columns
// (an edge a -> b costs the least that moving any one row of a to b costs). As in any
// successive-shortest-path method each intermediate state is optimal for its column sizes, so the last
// one is the optimum. O(N K log N + excess * (K^2 + moved rows * K log N)); a Hungarian method on
// columns repeated `capacity` times is O(N^3).
//
// Thread-safety: pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/result.h"

namespace kindred::expert {

struct Assignment {
  std::vector<uint32_t> column;  // [n]
  double total = 0;              // sum of the chosen costs
};

// `cost`: [n, k] row-major, finite, any sign. `capacity`: [k], rows a column may take; 0 is allowed.
// Deterministic; ties go to the lower column. Error: kInvalid if the shapes disagree, a cost is not
// finite, or the capacities sum to less than n.
Result<Assignment> assign_rows(std::span<const double> cost, std::span<const uint32_t> capacity);

// The permutation p that maximises sum of similarity[r, p[r]]; similarity: [k, k] row-major, finite. To
// align the centroids of a new fit with those of the old one, so that cohorts keep their identities.
Result<std::vector<uint32_t>> best_permutation(std::span<const double> similarity, size_t k);

}  // namespace kindred::expert
