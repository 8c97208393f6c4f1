#include "sim/placement_control.h"

#include <algorithm>

namespace kindred::sim {

PlacementControl::PlacementControl(const PlacementControlOptions& options, uint32_t sources, place::Placement at_first)
    : options_(options) {
  auto topology = place::tiered_topology(sources, at_first.ranks);
  KINDRED_CHECK(topology.ok());
  setup_.topology = *std::move(topology);
  setup_.weights = options.weights;
  setup_.old = std::move(at_first);
  if (options.hysteresis) rebalancer_.emplace(setup_, options.rebalance);
}

Result<std::optional<place::Placement>> PlacementControl::wanted(place::Traffic traffic) {
  if (rebalancer_) {
    auto decided = rebalancer_->window(std::move(traffic));
    if (!decided) return std::move(decided).error();
    plan_cost_s_ = decided->plan.cost_s;
    return std::move(decided->target);
  }
  if (std::ranges::all_of(traffic.tokens, [](double tokens) { return tokens == 0; })) {
    return std::optional<place::Placement>();
  }
  place::Problem problem = setup_;
  problem.traffic = std::move(traffic);
  auto solved = place::solve(problem, options_.rebalance.solver);
  if (!solved) return std::move(solved).error();
  if (options_.later_stall_s < 0 || options_.first_stall_s < 0) {
    const auto plan = place::plan_migration(problem, solved->placement, options_.rebalance.migration);
    if (!plan) return plan.error();
    plan_cost_s_ = plan->cost_s;
  }
  return std::optional(std::move(solved->placement));
}

Result<std::optional<PlacementControl::Move>> PlacementControl::window(place::Traffic traffic) {
  auto target = wanted(std::move(traffic));
  if (!target) return std::move(target).error();
  if (!*target || **target == setup_.old) return std::optional<Move>();
  Move move{.target = **std::move(target)};
  for (size_t i = 0; i < move.target.rank.size(); ++i)
    move.experts += move.target.rank[i] != setup_.old.rank[i] ? 1 : 0;
  const double stall_s = moves_++ == 0 ? options_.first_stall_s : options_.later_stall_s;
  move.stall_s = stall_s < 0 ? plan_cost_s_ : stall_s;
  setup_.old = move.target;
  if (rebalancer_) rebalancer_->moved_to(move.target);
  return std::optional(std::move(move));
}

}  // namespace kindred::sim
