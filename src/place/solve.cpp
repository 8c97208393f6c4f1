#include "place/solve.h"

#include <fmt/format.h>

#include "place/eplb.h"
#include "place/solvers.h"

namespace kindred::place {

std::string_view to_string(Solver solver) {
  switch (solver) {
    case Solver::kLinear: return "linear";
    case Solver::kRoundRobin: return "round-robin";
    case Solver::kEplb: return "eplb";
    case Solver::kGreedy: return "greedy";
    case Solver::kMoetuner: return "moetuner";
    case Solver::kSemMoe: return "sem-moe";
    case Solver::kExact: return "exact";
    case Solver::kFlow: return "flow";
  }
  return "unknown";
}

Result<Solver> parse_solver(std::string_view text) {
  std::string accepted;
  for (const Solver solver : kSolvers) {
    if (to_string(solver) == text) return solver;
    accepted += fmt::format("{}{}", accepted.empty() ? "" : ", ", to_string(solver));
  }
  return invalid(fmt::format("got '{}', accepted: {}", text, accepted), "solver");
}

namespace {

Result<Solution> run_solver(const Problem& problem, Solver solver, const SolveOptions& options) {
  switch (solver) {
    case Solver::kLinear: return Solution{.placement = place_linear(problem)};
    case Solver::kRoundRobin: return Solution{.placement = place_round_robin(problem)};
    case Solver::kGreedy: return Solution{.placement = place_greedy(problem)};
    case Solver::kMoetuner: return Solution{.placement = place_moetuner(problem)};
    case Solver::kSemMoe: return Solution{.placement = place_sem_moe(problem)};
    case Solver::kExact: return place_exact(problem, options);
    case Solver::kFlow: return place_flow(problem);
    case Solver::kEplb: break;
  }
  Result<Placement> placement = place_eplb(problem);
  if (!placement) return std::move(placement).error();
  return Solution{.placement = *std::move(placement)};
}

}  // namespace

Result<Solution> solve(const Problem& problem, Solver solver, const SolveOptions& options) {
  if (Status good = problem.check(); !good) return std::move(good).error();
  Result<Solution> solution = run_solver(problem, solver, options);
  if (solution) KINDRED_CHECK(solution->placement.check(problem.slots()).ok());
  return solution;
}

}  // namespace kindred::place
