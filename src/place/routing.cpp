#include "place/routing.h"

#include <algorithm>
#include <cmath>

namespace kindred::place {

LayerRouting::LayerRouting(const Problem& problem, size_t layer)
    : problem_(problem),
      traffic_(problem.traffic.layer(layer)),
      experts_(problem.traffic.experts),
      loads_(problem.ranks(), 0.0) {
  if (!problem.old.empty()) old_holders_ = problem.old.holders(layer);
  double sum = 0;
  for (const double tokens : traffic_) sum += tokens;
  mean_load_ = sum / problem.ranks();
}

double LayerRouting::move_cost(size_t expert, uint32_t rank) const {
  if (old_holders_.empty()) return 0;
  const std::vector<uint32_t>& old = old_holders_[expert];
  return std::find(old.begin(), old.end(), rank) == old.end() ? problem_.weights.gamma : 0;
}

void LayerRouting::route(size_t expert, std::span<const uint32_t> holders, ExpertFlow& flow) const {
  flow.communication = flow.remote_tokens = 0;
  flow.load.assign(holders.size(), 0.0);
  const Topology& topology = problem_.topology;
  for (size_t s = 0; s < topology.sources; ++s) {
    const double tokens = tokens_from(s, expert);
    if (tokens == 0) continue;
    double nearest = topology.at(s, holders[0]);
    size_t as_near = 1;
    for (size_t h = 1; h < holders.size(); ++h) {
      const double distance = topology.at(s, holders[h]);
      if (distance < nearest) {
        nearest = distance;
        as_near = 0;
      }
      if (distance == nearest) ++as_near;
    }
    flow.communication += tokens * nearest;
    if (nearest > 0) flow.remote_tokens += tokens;
    for (size_t h = 0; h < holders.size(); ++h) {
      if (topology.at(s, holders[h]) == nearest) flow.load[h] += tokens / static_cast<double>(as_near);
    }
  }
}

Cost LayerRouting::cost(const std::vector<std::vector<uint32_t>>& holders) {
  Cost cost;
  std::fill(loads_.begin(), loads_.end(), 0.0);
  ExpertFlow flow;
  for (size_t e = 0; e < experts_; ++e) {
    route(e, holders[e], flow);
    cost.communication += flow.communication;
    cost.remote_tokens += flow.remote_tokens;
    for (size_t h = 0; h < holders[e].size(); ++h) {
      loads_[holders[e][h]] += flow.load[h];
      if (!old_holders_.empty() && !std::binary_search(old_holders_[e].begin(), old_holders_[e].end(), holders[e][h])) {
        ++cost.moves;
      }
    }
  }
  cost.mean_load = mean_load_;
  cost.tokens = mean_load_ * problem_.ranks();
  for (const double load : loads_) {
    cost.imbalance += std::abs(load - mean_load_);
    cost.max_load = std::max(cost.max_load, load);
  }
  const Weights& weights = problem_.weights;
  cost.objective =
      weights.alpha * cost.communication + weights.beta * cost.imbalance + weights.gamma * cost.moves;
  return cost;
}

void LayerRouting::single_costs(size_t expert, std::span<double> out) const {
  const Topology& topology = problem_.topology;
  std::fill(out.begin(), out.end(), 0.0);
  for (size_t s = 0; s < topology.sources; ++s) {
    const double weighted = problem_.weights.alpha * tokens_from(s, expert);
    for (uint32_t r = 0; r < topology.ranks; ++r) out[r] += weighted * topology.at(s, r);
  }
  if (old_holders_.empty()) return;
  for (uint32_t r = 0; r < topology.ranks; ++r) out[r] += problem_.weights.gamma;
  for (const uint32_t r : old_holders_[expert]) out[r] -= problem_.weights.gamma;
}

}  // namespace kindred::place
