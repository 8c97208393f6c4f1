// Where a simulated worker's experts sit, window by window: the traffic of each window goes to a solver of src/place,
// and what comes out is applied, at a price.
//
// Two rules. `hysteresis`: place::Rebalancer, the rule of `kindred worker`'s own controller: the mean of several
// windows, a plan that must pay, and rest afterwards. Without: each window's own placement is applied if it differs, as
// vLLM's EPLB and Gimbal do.
//
// Thread-safety: none; belongs to one worker.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "place/rebalance.h"

namespace kindred::sim {

struct PlacementControlOptions {
  place::RebalanceOptions rebalance = {};  // .solver counts for both rules, the rest for hysteresis
  place::Weights weights = {};
  bool hysteresis = true;
  double window_s = 10;  // above 0
  // What a rearrangement holds up the worker; below 0: what its plan says that links need. Gimbal (section 2.2.2)
  // measured 1.08 s for the first one of all layers, and 0.72 s for later ones.
  double first_stall_s = -1, later_stall_s = -1;
};

class PlacementControl {
 public:
  // `at_first`: where experts sit now.
  PlacementControl(const PlacementControlOptions& options, uint32_t sources, place::Placement at_first);

  struct Move {
    place::Placement target;
    uint64_t experts = 0;  // that change their rank
    double stall_s = 0;
  };
  // A window has passed. No value: all stays. Error: what the solver says.
  Result<std::optional<Move>> window(place::Traffic traffic);

  double window_s() const { return options_.window_s; }

 private:
  Result<std::optional<place::Placement>> wanted(place::Traffic traffic);

  PlacementControlOptions options_;
  place::Problem setup_;
  std::optional<place::Rebalancer> rebalancer_;  // with hysteresis
  double plan_cost_s_ = 0;
  uint64_t moves_ = 0;
};

}  // namespace kindred::sim
