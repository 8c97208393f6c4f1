// Where the tokens of a layer go when experts may have several copies: the price list of one layer.
//
// Thread-safety: none; scratch of one solver.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "place/problem.h"

namespace kindred::place {

// What one expert brings to the ranks that hold it.
struct ExpertFlow {
  double communication = 0, remote_tokens = 0;
  std::vector<double> load = {};  // [holders], tokens each works on
};

class LayerRouting {
 public:
  // Borrows `problem`.
  LayerRouting(const Problem& problem, size_t layer);

  // `holders`: ranks that hold `expert`, at least one, each once. Into `flow`, whose memory is reused.
  void route(size_t expert, std::span<const uint32_t> holders, ExpertFlow& flow) const;

  // Of a whole layer; `holders` [E]. loads() is of this placement until the next call.
  Cost cost(const std::vector<std::vector<uint32_t>>& holders);
  std::span<const double> loads() const { return loads_; }  // [R]

  // alpha * communication + gamma * [not there before] of `expert` with its only copy on each rank, [R].
  void single_costs(size_t expert, std::span<double> out) const;

  // gamma for a copy of `expert` on a rank that did not hold it before, else 0.
  double move_cost(size_t expert, uint32_t rank) const;
  double tokens_from(size_t source, size_t expert) const { return traffic_[source * experts_ + expert]; }
  double mean_load() const { return mean_load_; }
  const Problem& problem() const { return problem_; }

 private:
  const Problem& problem_;
  std::span<const double> traffic_;                // [S, E]
  size_t experts_;
  std::vector<std::vector<uint32_t>> old_holders_;  // [E], or empty: nothing was placed
  std::vector<double> loads_;
  double mean_load_ = 0;
};

}  // namespace kindred::place
