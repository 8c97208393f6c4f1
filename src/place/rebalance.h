// When to place anew: windows of traffic in, a migration out when it pays. For a worker's controller and for the
// simulator, which call it every few seconds.
//
// Hysteresis. The placement is sought for the mean of the last windows, none before there are enough of them; its
// plan must pay (place/migration.h), gain more than noise would, and be a gain in more than half of those windows one
// by one; after a migration as many windows pass without another as it was expected to need to pay off. So traffic that
// alternates faster than the windows' number looks constant, and slower changes are followed at the price that was
// agreed to.
//
// Thread-safety: none; one owner.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>

#include "place/migration.h"
#include "place/solve.h"

namespace kindred::place {

struct RebalanceOptions {
  Solver solver = Solver::kFlow;
  uint32_t windows = 4;       // remembered, 1 or more
  double least_share = 0.03;  // of window_s() that a migration must gain; less is noise
  // A new placement each `windows` windows whether it pays or not, as vLLM does with EPLB. To compare with.
  bool always = false;
  MigrationOptions migration = {};
};

struct Rebalance {
  std::optional<Placement> target;  // to be applied by `plan`; empty: stay
  MigrationPlan plan;               // the last one drawn up, whether it pays or not
  std::string reason;               // why, in words
};

class Rebalancer {
 public:
  // `setup`: all of a problem but its traffic; setup.old is the placement now. `options.windows` must be 1 or more.
  Rebalancer(Problem setup, const RebalanceOptions& options);

  // One window's traffic, of one shape every time. Error: what solve() and plan_migration() say. A window without any
  // tokens is none, and changes nothing.
  Result<Rebalance> window(Traffic traffic);
  // The caller has applied a target, or another placement. Begins the rest.
  void moved_to(Placement placement);
  const Placement& placement() const { return setup_.old; }

 private:
  Traffic mean() const;
  double seconds(const Traffic& traffic, const Placement& placement) const;
  bool gains_in_most(const Placement& target) const;

  Problem setup_;
  RebalanceOptions options_;
  std::deque<Traffic> seen_;
  uint32_t resting_ = 0;  // windows left
};

}  // namespace kindred::place
