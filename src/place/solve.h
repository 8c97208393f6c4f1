// All ways to place experts, behind one interface.
//
//   linear       expert e on rank e * R / E; vLLM's order for redundant slots
//   round-robin  expert e on rank e mod R
//   eplb         DeepSeek's: replication and hierarchical packing by load (place/eplb.h)
//   greedy       Gimbal's: hottest first, each to the rank of lowest score
//   moetuner     after MoETuner (Go and Mahajan, 2025): experts that follow each other in neighbouring layers together
//   sem-moe      after Sem-MoE (Li et al., 2026): experts that the same class of requests activates together, at the
//                ranks where that class comes from; the classes are the sources
//   exact        a mixed-integer program per layer, by HiGHS
//   flow         ours: transportation with a price on load, then swap descent (place/settle.h)
//
// With redundant slots, `round-robin`, `greedy`, `moetuner` and `sem-moe` copy the experts with the highest load per
// copy to the ranks that have least to do; `flow` copies by source; `exact` refuses.
//
// Thread-safety: pure functions.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "place/problem.h"

namespace kindred::place {

enum class Solver { kLinear, kRoundRobin, kEplb, kGreedy, kMoetuner, kSemMoe, kExact, kFlow };
inline constexpr std::array kSolvers = {Solver::kLinear,   Solver::kRoundRobin, Solver::kEplb,  Solver::kGreedy,
                                        Solver::kMoetuner, Solver::kSemMoe,     Solver::kExact, Solver::kFlow};
std::string_view to_string(Solver solver);
Result<Solver> parse_solver(std::string_view text);

// Whether `exact` can be used in this build.
bool has_exact();

struct SolveOptions {
  double time_limit_s = 10;                       // of `exact`, per layer
  std::function<void(size_t done)> on_layer = {};  // of `exact`, after each layer
};

struct Solution {
  Placement placement;
  // [L]: no placement has a lower objective. Of `exact` and, without redundant slots, of `flow`; else empty.
  std::vector<double> bound = {};
};

// Error: what problem.check() says; kInvalid: the solver cannot do this (a cap that cannot be kept or was not found
// to be, redundant slots for `exact`); kUnavailable: `exact` in a build without HiGHS; kTimeout: `exact` found
// nothing in time.
Result<Solution> solve(const Problem& problem, Solver solver, const SolveOptions& options = {});

}  // namespace kindred::place
