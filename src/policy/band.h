// The locality band (ELDR): the workers whose cohort is about as close to the request as the closest
// one; the least loaded of them wins.
//
// Reference: casys-kaist/ELDR eldr/serving/routing.py, whose comparison in float32 is kept: with
// tau = 0.1 a worker that reads as "exactly on the edge" is inside in float32 and outside in float64.
//
// Thread-safety: pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "policy/types.h"

namespace kindred::policy {

// Who joins a band of one where several workers are second best.
enum class TiedSeconds { kFirst, kAll };

// Positions in `scores`, ascending, of those within `tau` of the best. If tau > 0 leaves only one of
// several, the second best joins it (`seconds` where several are), so that load always has a say; tau = 0
// means the best only, with all that tie for it. `eligible`: positions to consider, ascending; the others do not exist.
// Scores must be finite.
std::vector<uint32_t> locality_band(std::span<const float> scores, std::span<const uint32_t> eligible, float tau,
                                    TiedSeconds seconds = TiedSeconds::kFirst);

// The highest load a worker may have and still get a request that adds `request_load`:
//   cap * (sum of available loads + request_load) / available workers,
// rounded up to a whole multiple of request_load. Rounding up keeps the cap from scattering an almost
// idle fleet (a mean of 0.4 requests must not exclude whoever has one), and as cap >= 1 the least loaded
// worker is always within it. Infinity if cap is 0 or infinite.
double load_limit(std::span<const WorkerView> workers, double cap, double request_load);

}  // namespace kindred::policy
