// Rows to ranks, each rank exactly full, at least cost plus a price on the ranks' loads:
//   sum_i cost[i, rank(i)] + beta * sum_r |load_r - mean|
//
// Transportation first: without the last term it is an assignment, solved exactly on the residual graph
// (expert/assign.h). Since beta * |x| = max over |p| <= beta of p * x, any prices p_r in [-beta, beta] on load turn
// the problem into an assignment whose optimum, less sum_r p_r * mean, is a lower bound; so every price tried proves
// how good the result is. Then swap descent: rows of two ranks are swapped while that pays, with the loads taken
// exactly. Then kicks: two pairs that cost little to swap are swapped, and the descent is repeated from there.
//
// All of it is deterministic, and bounded by counts, not by time.
//
// Thread-safety: none; memory of one Settler is reused between calls.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "base/rng.h"

namespace kindred::place {

struct Rows {
  std::span<const double> cost;  // [N, R], finite
  std::span<const double> load;  // [N], >= 0
  uint32_t ranks = 1;            // N = ranks * rows a rank
  double beta = 0;
  double load_cap = std::numeric_limits<double>::infinity();  // of a rank, in units of load
};

struct Settled {
  std::vector<uint32_t> rank;  // [N]
  double objective = 0;        // as above; without what exceeds the cap
  double bound = 0;            // no assignment is cheaper
  double excess = 0;           // sum of loads above the cap: 0 unless none under it was found
};

struct SettleOptions {
  uint32_t price_rounds = 1;  // assignments with a price, after the one without
  uint32_t kicks = 8;         // failed ones in a row, after which the search ends
};

class Settler {
 public:
  Settled settle(const Rows& rows, const SettleOptions& options = {});
  // Only the descent, from `start` [N], in which every rank is exactly full. No bound: minus infinity.
  Settled descend(const Rows& rows, std::span<const uint32_t> start);

 private:
  struct State {
    std::vector<uint32_t> member;  // [R, slots]: the rows on each rank
    std::vector<double> load;      // [R]
    double objective = 0;          // with the penalty for excess
  };
  struct Swap {
    double delta = 0;
    uint32_t a = 0, b = 0, i = 0, j = 0;  // ranks, and slots on them
  };

  void begin(const Rows& rows);
  void load_state(std::span<const uint32_t> rank, State& state) const;
  double load_price(double load) const;
  double cost(uint32_t row, uint32_t rank) const { return rows_.cost[size_t{row} * rows_.ranks + rank]; }
  Swap best_swap(const State& state, uint32_t a, uint32_t b);
  void apply(State& state, const Swap& swap);
  void descend(State& state);
  void kick(State& state, Rng& rng);
  void search(State& best, uint32_t kicks);
  // The optimum at these prices, [R]; raises `bound` to what it proves.
  std::vector<uint32_t> assign_at(std::span<const double> price, double& bound);
  Settled finish(const State& state) const;

  Rows rows_;
  uint32_t slots_ = 0;
  double mean_ = 0, penalty_ = 0, least_gain_ = 0;
  std::vector<double> entering_, entering_load_;  // [slots]: of the rank that best_swap looks at
  std::vector<double> priced_;                    // [N, R]
  std::vector<uint8_t> settled_pair_;             // [R, R], a < b: no swap of these two pays
};

}  // namespace kindred::place
