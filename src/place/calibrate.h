// What the weights of Gimbal's greedy are worth: a sweep of (beta, gamma), alpha = 1, against a reference placement
// (the exact one, or flow's), as in the paper's figure 6.
//
// Thread-safety: pure functions.
#pragma once

#include <span>
#include <vector>

#include "base/result.h"
#include "place/problem.h"

namespace kindred::place {

struct CalibrationPoint {
  Weights weights;
  double kept = 0;               // share of experts that greedy puts on the reference's rank
  double kept_source = 0;        // share put on a rank as near to every source as the reference's
  double communication_gap = 0;  // over the reference's, as a share of it; negative: less than it
  Cost cost;                     // of the whole, judged by problem.weights
};

// One point per pair. Error: what problem.check() says, or a reference that is no placement for it.
Result<std::vector<CalibrationPoint>> calibrate_greedy(const Problem& problem, const Placement& reference,
                                                       std::span<const double> betas, std::span<const double> gammas);

// (1, beta, gamma) of the lowest objective; of equals the one that keeps more.
const CalibrationPoint& best_point(std::span<const CalibrationPoint> points);

}  // namespace kindred::place
