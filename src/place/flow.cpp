// Ours: settle.h per layer; with redundant slots, rows are the parts of an expert's traffic that a copy should serve,
// and a search over what each slot holds follows.

#include <fmt/format.h>

#include <algorithm>

#include "place/copies.h"
#include "place/routing.h"
#include "place/settle.h"
#include "place/solvers.h"

namespace kindred::place {
namespace {

// Kicks are shared among the layers: a whole model's placement stays within milliseconds, and a few layers are
// searched harder.
uint32_t kicks_per_layer(uint32_t layers) { return std::clamp(288 / layers, 4U, 192U); }

Error above_cap(const Problem& problem, size_t layer, double max_load, double mean) {
  return invalid(fmt::format("{}: flow found no placement of layer {} under it; the best has a rank at {:.3f} times "
                             "the mean load. Redundant slots would help, or a higher cap",
                             problem.load_cap, layer, mean > 0 ? max_load / mean : 1),
                 "load_cap");
}

Settled settle_experts(const Problem& problem, size_t layer, Settler& settler, std::vector<double>& cost) {
  const LayerRouting routing(problem, layer);
  const size_t ranks = problem.ranks();
  cost.resize(problem.traffic.experts * ranks);
  for (size_t e = 0; e < problem.traffic.experts; ++e) routing.single_costs(e, {cost.data() + e * ranks, ranks});
  const std::vector<double> load = problem.traffic.load(layer);
  const Rows rows{.cost = cost,
                  .load = load,
                  .ranks = problem.ranks(),
                  .beta = problem.weights.beta,
                  .load_cap = problem.load_cap * routing.mean_load()};
  return settler.settle(rows, {.kicks = kicks_per_layer(problem.traffic.layers)});
}

Result<Solution> flow_with_copies(const Problem& problem) {
  Solution solution;
  Placement& placement = solution.placement;
  placement = {.layers = problem.traffic.layers, .experts = problem.traffic.experts, .ranks = problem.ranks()};
  Settler settler;
  for (uint32_t l = 0; l < placement.layers; ++l) {
    LayerRouting routing(problem, l);
    const std::vector<std::vector<uint32_t>> holders = place_copies(routing, settler);
    const Cost cost = routing.cost(holders);
    if (cost.max_load > problem.load_cap * cost.mean_load * (1 + 1e-9)) {
      return above_cap(problem, l, cost.max_load, cost.mean_load);
    }
    for (uint32_t e = 0; e < placement.experts; ++e) {
      placement.rank.push_back(holders[e].front());
      for (size_t h = 1; h < holders[e].size(); ++h) {
        placement.copies.push_back({.layer = l, .expert = e, .rank = holders[e][h]});
      }
    }
  }
  return solution;
}

}  // namespace

Result<Solution> place_flow(const Problem& problem) {
  if (problem.redundant > 0) return flow_with_copies(problem);
  Solution solution;
  solution.placement = {.layers = problem.traffic.layers, .experts = problem.traffic.experts, .ranks = problem.ranks()};
  Settler settler;
  std::vector<double> cost;
  for (size_t l = 0; l < problem.traffic.layers; ++l) {
    const Settled settled = settle_experts(problem, l, settler, cost);
    solution.placement.rank.insert(solution.placement.rank.end(), settled.rank.begin(), settled.rank.end());
    solution.bound.push_back(settled.bound);
    if (settled.excess > 0) {
      LayerRouting routing(problem, l);
      const double max_load = routing.cost(solution.placement.holders(l)).max_load;
      return above_cap(problem, l, max_load, routing.mean_load());
    }
  }
  return solution;
}

}  // namespace kindred::place
