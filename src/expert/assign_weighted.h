// Assignment of many weighted rows to few columns, none of which may get much more than its share of the
// weight: cohorts that are balanced by expected decode work instead of by requests.
//
// Whether rows fit under a cap at all is bin packing, so the cap is soft, in a stated way. First the problem
// with rows that may be split is solved exactly: every row in its cheapest column, then overfull columns are
// drained along shortest paths of the K-column residual graph, as in assign.h, in units of weight. That is a
// transportation problem, and its optimum a lower bound for every whole assignment under the cap. It leaves
// fewer than K rows split, but for ties. Each of these then goes, heaviest first, where it is cheapest among the
// columns that it was split over and that have room for it, else into the lightest column; what is still over
// the cap is repaired by the moves and swaps of least cost per weight removed.
//
// Guaranteed: no column weighs more than `limit` = max(cap, mean + heaviest row), since a lightest column
// weighs at most the mean. There is no lower bound for a column, as there is none under a cap on the count.
//
// Thread-safety: a pure function.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/result.h"

namespace kindred::expert {

struct WeightedAssignment {
  std::vector<uint32_t> column;  // [n]
  double total = 0;              // sum of the chosen costs
  double lower_bound = 0;        // no assignment under the cap costs less, but for rounding
  uint64_t limit = 0;            // see above
  uint32_t split = 0;            // rows that the exact solution split
};

// `cost`: [n, k] row-major, finite, any sign. `weights`: [n], each > 0. `cap`: for each of the k `columns`.
// Deterministic. Error: kInvalid if the shapes disagree, a cost is not finite, a weight is 0, or k * cap is
// less than the sum of the weights.
Result<WeightedAssignment> assign_weighted(std::span<const double> cost, std::span<const uint32_t> weights,
                                           size_t columns, uint64_t cap);

}  // namespace kindred::expert
