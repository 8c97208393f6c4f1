// The optimum of a layer, by HiGHS (MIT): its mixed-integer solver, through its C interface.
//
//   min sum c[e, r] x[e, r] + beta * mean * sum t[r]
//   sum_r x[e, r] = 1,  sum_e x[e, r] = slots,  t[r] >= +-(load_r / mean - 1),  load_r / mean <= load_cap,  x binary
//
// `flow`'s placement is given to it as a start.

#include <fmt/format.h>
#include <highs/interfaces/highs_c_api.h>

#include <algorithm>
#include <cmath>
#include <memory>

#include "place/routing.h"
#include "place/solvers.h"

namespace kindred::place {
namespace {

// Column-wise constraint matrix and bounds, in the form of Highs_passMip.
struct Program {
  HighsInt experts = 0, ranks = 0;
  std::vector<double> cost = {}, column_upper = {}, row_lower = {}, row_upper = {}, value = {};
  std::vector<HighsInt> start = {}, index = {}, integrality = {};

  HighsInt columns() const { return static_cast<HighsInt>(cost.size()); }
  HighsInt rows() const { return static_cast<HighsInt>(row_lower.size()); }
  // Rows: one per expert, then one per rank for its slots, above the mean, below the mean, and the cap.
  HighsInt slots_row(HighsInt r) const { return experts + r; }
  HighsInt above_row(HighsInt r) const { return experts + ranks + r; }
  HighsInt below_row(HighsInt r) const { return experts + 2 * ranks + r; }
  HighsInt cap_row(HighsInt r) const { return experts + 3 * ranks + r; }

  void entry(HighsInt row, double coefficient) {
    index.push_back(row);
    value.push_back(coefficient);
  }
};

Program program_of(const Problem& problem, size_t layer) {
  const LayerRouting routing(problem, layer);
  const std::vector<double> load = problem.traffic.load(layer);
  const double mean = std::max(routing.mean_load(), 1e-300);  // a layer without tokens
  Program program{.experts = static_cast<HighsInt>(load.size()), .ranks = static_cast<HighsInt>(problem.ranks())};
  std::vector<double> cost(problem.ranks());
  for (HighsInt e = 0; e < program.experts; ++e) {
    routing.single_costs(static_cast<size_t>(e), cost);
    for (HighsInt r = 0; r < program.ranks; ++r) {
      const double share = load[static_cast<size_t>(e)] / mean;
      program.start.push_back(static_cast<HighsInt>(program.index.size()));
      program.entry(e, 1);
      program.entry(program.slots_row(r), 1);
      program.entry(program.above_row(r), share);
      program.entry(program.below_row(r), share);
      program.entry(program.cap_row(r), share);
      program.cost.push_back(cost[static_cast<size_t>(r)]);
      program.column_upper.push_back(1);
      program.integrality.push_back(kHighsVarTypeInteger);
    }
  }
  for (HighsInt r = 0; r < program.ranks; ++r) {
    program.start.push_back(static_cast<HighsInt>(program.index.size()));
    program.entry(program.above_row(r), -1);
    program.entry(program.below_row(r), 1);
    program.cost.push_back(problem.weights.beta * mean);
    program.column_upper.push_back(INFINITY);
    program.integrality.push_back(kHighsVarTypeContinuous);
  }
  const auto rows = [&](HighsInt count, double lower, double upper) {
    program.row_lower.insert(program.row_lower.end(), static_cast<size_t>(count), lower);
    program.row_upper.insert(program.row_upper.end(), static_cast<size_t>(count), upper);
  };
  rows(program.experts, 1, 1);
  rows(program.ranks, problem.slots(), problem.slots());
  rows(program.ranks, -INFINITY, 1);
  rows(program.ranks, 1, INFINITY);
  rows(program.ranks, -INFINITY, problem.load_cap);
  return program;
}

struct HighsDeleter {
  void operator()(void* highs) const { Highs_destroy(highs); }
};
using HighsPointer = std::unique_ptr<void, HighsDeleter>;

void give_start(void* highs, const Problem& problem, const Program& program, std::span<const uint32_t> rank,
                std::span<const double> loads, double mean) {
  std::vector<double> value(static_cast<size_t>(program.columns()), 0.0);
  for (size_t e = 0; e < rank.size(); ++e) value[e * problem.ranks() + rank[e]] = 1;
  for (size_t r = 0; r < loads.size(); ++r) {
    value[rank.size() * problem.ranks() + r] = std::abs(loads[r] / std::max(mean, 1e-300) - 1);
  }
  Highs_setSolution(highs, value.data(), nullptr, nullptr, nullptr);
}

Result<double> run(void* highs, size_t layer, std::vector<double>& value, std::span<double> row_values) {
  if (Highs_run(highs) == kHighsStatusError) {
    return Error{ErrorCode::kInternal, fmt::format("exact, layer {}: HiGHS failed", layer)};
  }
  const HighsInt status = Highs_getModelStatus(highs);
  if (status == kHighsModelStatusInfeasible) {
    return invalid(fmt::format("exact, layer {}: no placement keeps every rank under the cap", layer), "load_cap");
  }
  HighsInt feasible = 0;
  Highs_getIntInfoValue(highs, "primal_solution_status", &feasible);
  if (feasible != kHighsSolutionStatusFeasible) {
    return Error{ErrorCode::kTimeout, fmt::format("exact, layer {}: no placement found in time", layer)};
  }
  Highs_getSolution(highs, value.data(), nullptr, row_values.data(), nullptr);
  double bound = 0;
  Highs_getDoubleInfoValue(highs, "mip_dual_bound", &bound);
  return bound;
}

// Appends the layer's ranks; returns the bound.
Result<double> solve_layer(const Problem& problem, size_t layer, const Placement* hint, double time_limit_s,
                           std::vector<uint32_t>& out) {
  const Program program = program_of(problem, layer);
  const HighsPointer highs(Highs_create());
  Highs_setBoolOptionValue(highs.get(), "output_flag", 0);
  Highs_setIntOptionValue(highs.get(), "threads", 1);
  Highs_setDoubleOptionValue(highs.get(), "time_limit", time_limit_s);
  Highs_setDoubleOptionValue(highs.get(), "mip_rel_gap", 0);
  Highs_setDoubleOptionValue(highs.get(), "mip_abs_gap", 1e-6);
  const HighsInt passed = Highs_passMip(
      highs.get(), program.columns(), program.rows(), static_cast<HighsInt>(program.index.size()),
      kHighsMatrixFormatColwise, kHighsObjSenseMinimize, 0, program.cost.data(),
      std::vector<double>(program.cost.size(), 0.0).data(), program.column_upper.data(), program.row_lower.data(),
      program.row_upper.data(), program.start.data(), program.index.data(), program.value.data(),
      program.integrality.data());
  if (passed == kHighsStatusError) return Error{ErrorCode::kInternal, "exact: HiGHS refused the program"};
  if (hint != nullptr) {
    LayerRouting routing(problem, layer);
    const double mean = routing.mean_load();
    routing.cost(hint->holders(layer));
    give_start(highs.get(), problem, program, hint->layer(layer), routing.loads(), mean);
  }
  std::vector<double> value(static_cast<size_t>(program.columns())), rows(static_cast<size_t>(program.rows()));
  Result<double> bound = run(highs.get(), layer, value, rows);
  if (!bound) return bound;
  for (size_t e = 0; e < problem.traffic.experts; ++e) {
    const double* first = value.data() + e * problem.ranks();
    out.push_back(static_cast<uint32_t>(std::max_element(first, first + problem.ranks()) - first));
  }
  return bound;
}

}  // namespace

bool has_exact() { return true; }

Result<Solution> place_exact(const Problem& problem, const SolveOptions& options) {
  if (problem.redundant > 0) {
    return invalid("exact takes no redundant slots; accepted: 0 (flow and eplb do take them)", "redundant");
  }
  const Result<Solution> hint = place_flow(problem);
  Solution solution;
  solution.placement = {
      .layers = problem.traffic.layers, .experts = problem.traffic.experts, .ranks = problem.ranks()};
  for (size_t l = 0; l < problem.traffic.layers; ++l) {
    const Result<double> bound = solve_layer(problem, l, hint ? &hint->placement : nullptr, options.time_limit_s,
                                             solution.placement.rank);
    if (!bound) return bound.error();
    solution.bound.push_back(*bound);
    if (options.on_layer) options.on_layer(l + 1);
  }
  if (Status good = solution.placement.check(problem.slots()); !good) {
    return Error{ErrorCode::kInternal, "exact: HiGHS's solution is not integral: " + good.error().message};
  }
  return solution;
}

}  // namespace kindred::place
