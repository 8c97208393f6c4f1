// In builds without HiGHS.

#include "place/solvers.h"

namespace kindred::place {

bool has_exact() { return false; }

Result<Solution> place_exact(const Problem&, const SolveOptions&) {
  return Error{ErrorCode::kUnavailable,
               "exact needs HiGHS, and this build has none: `./dev build` fetches it; flow comes within a fraction of "
               "a percent and prints how far it can be off",
               "solver"};
}

}  // namespace kindred::place
