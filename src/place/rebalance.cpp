#include "place/rebalance.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace kindred::place {

Rebalancer::Rebalancer(Problem setup, const RebalanceOptions& options) : setup_(std::move(setup)), options_(options) {
  KINDRED_CHECK(options_.windows >= 1 && !setup_.old.empty());
}

Traffic Rebalancer::mean() const {
  Traffic mean = seen_.front();
  for (size_t w = 1; w < seen_.size(); ++w) {
    for (size_t i = 0; i < mean.tokens.size(); ++i) mean.tokens[i] += seen_[w].tokens[i];
  }
  for (double& tokens : mean.tokens) tokens /= static_cast<double>(seen_.size());
  return mean;
}

double Rebalancer::seconds(const Traffic& traffic, const Placement& placement) const {
  Problem problem = setup_;
  problem.traffic = traffic;
  return window_s(total(evaluate(problem, placement)), problem.ranks(), options_.migration);
}

bool Rebalancer::gains_in_most(const Placement& target) const {
  const auto better = std::count_if(seen_.begin(), seen_.end(), [&](const Traffic& traffic) {
    return seconds(traffic, target) < seconds(traffic, setup_.old);
  });
  return 2 * static_cast<size_t>(better) > seen_.size();
}

Result<Rebalance> Rebalancer::window(Traffic traffic) {
  Rebalance out;
  if (std::all_of(traffic.tokens.begin(), traffic.tokens.end(), [](double t) { return t == 0; })) {
    out.reason = "no traffic";
    return out;
  }
  Problem problem = setup_;
  problem.traffic = traffic;
  if (Status good = problem.check(); !good) return std::move(good).error();
  seen_.push_back(std::move(traffic));
  if (seen_.size() > options_.windows) seen_.pop_front();
  if (resting_ > 0) {
    out.reason =
        fmt::format("{}, {} windows more", options_.always ? "not yet due" : "resting after a migration", resting_);
    --resting_;
    return out;
  }
  if (seen_.size() < options_.windows) {
    out.reason = fmt::format("{} of {} windows seen", seen_.size(), options_.windows);
    return out;
  }
  problem.traffic = mean();
  Result<Solution> solution = solve(problem, options_.solver);
  if (!solution) return std::move(solution).error();
  Result<MigrationPlan> plan = plan_migration(problem, solution->placement, options_.migration);
  if (!plan) return std::move(plan).error();
  out.plan = *std::move(plan);
  out.reason = out.plan.reason;
  if (options_.always) {
    out.reason = "due: " + out.reason;
    resting_ = options_.windows - 1;  // where nothing moves: moved_to() says the same otherwise
    if (solution->placement != setup_.old) out.target = std::move(solution->placement);
    return out;
  }
  if (!out.plan.pays) return out;
  if (out.plan.gain_s < options_.least_share * seconds(problem.traffic, setup_.old)) {
    out.reason = fmt::format("{:.3g} s a window would be gained: too little to be more than noise", out.plan.gain_s);
    return out;
  }
  if (!gains_in_most(solution->placement)) {
    out.reason = "it would gain in the mean, but not in most windows";
    return out;
  }
  out.target = std::move(solution->placement);
  return out;
}

void Rebalancer::moved_to(Placement placement) {
  setup_.old = std::move(placement);
  resting_ = options_.always ? options_.windows - 1
                             : static_cast<uint32_t>(std::min(std::ceil(options_.migration.windows), 1e6));
}

}  // namespace kindred::place
