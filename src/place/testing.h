// For tests: problems, read and made up.
#pragma once

#include "base/golden_files.h"
#include "base/rng.h"
#include "place/problem.h"

namespace kindred::place {

// Of a placement_milp_* golden.
inline Problem problem_of_golden(const Json& golden) {
  Problem problem;
  problem.traffic = {.layers = golden["L"], .sources = golden["S"], .experts = golden["E"]};
  problem.traffic.tokens = flat<double>(golden["A"]);
  Result<Topology> topology = tiered_topology(golden["S"], golden["R"]);
  KINDRED_CHECK(topology.ok());
  problem.topology = *std::move(topology);
  problem.old = {.layers = golden["L"], .experts = golden["E"], .ranks = golden["R"]};
  problem.old.rank = flat<uint32_t>(golden["old_rank"]);
  problem.weights = {.alpha = golden["alpha"], .beta = golden["beta"], .gamma = golden["gamma"]};
  return problem;
}

}  // namespace kindred::place
