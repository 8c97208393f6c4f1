#include "place/calibrate.h"

#include <algorithm>

#include "place/solvers.h"

namespace kindred::place {
namespace {

bool as_near(const Topology& topology, uint32_t a, uint32_t b) {
  for (size_t s = 0; s < topology.sources; ++s) {
    if (topology.at(s, a) != topology.at(s, b)) return false;
  }
  return true;
}

CalibrationPoint try_weights(Problem problem, const Weights& weights, const Placement& reference,
                             double reference_communication) {
  const Weights judged_by = problem.weights;
  problem.weights = weights;
  const Placement placement = place_greedy(problem);
  problem.weights = judged_by;
  CalibrationPoint point{.weights = weights, .cost = total(evaluate(problem, placement))};
  size_t kept = 0, near = 0;
  for (size_t i = 0; i < placement.rank.size(); ++i) {
    if (placement.rank[i] == reference.rank[i]) ++kept;
    if (as_near(problem.topology, placement.rank[i], reference.rank[i])) ++near;
  }
  const auto of = static_cast<double>(placement.rank.size());
  point.kept = static_cast<double>(kept) / of;
  point.kept_source = static_cast<double>(near) / of;
  if (reference_communication > 0) {
    point.communication_gap = point.cost.communication / reference_communication - 1;
  }
  return point;
}

}  // namespace

Result<std::vector<CalibrationPoint>> calibrate_greedy(const Problem& problem, const Placement& reference,
                                                       std::span<const double> betas, std::span<const double> gammas) {
  if (Status good = problem.check(); !good) return std::move(good).error();
  Problem with_reference = problem;  // for the same checks
  with_reference.old = reference;
  if (Status good = with_reference.check(); !good) return std::move(good).error();
  const double communication = total(evaluate(problem, reference)).communication;
  std::vector<CalibrationPoint> points;
  for (const double beta : betas) {
    for (const double gamma : gammas) {
      points.push_back(try_weights(problem, {.alpha = 1, .beta = beta, .gamma = gamma}, reference, communication));
    }
  }
  return points;
}

const CalibrationPoint& best_point(std::span<const CalibrationPoint> points) {
  KINDRED_CHECK(!points.empty());
  return *std::min_element(points.begin(), points.end(), [](const CalibrationPoint& a, const CalibrationPoint& b) {
    if (a.cost.objective != b.cost.objective) return a.cost.objective < b.cost.objective;
    return a.kept > b.kept;
  });
}

}  // namespace kindred::place
