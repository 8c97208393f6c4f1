// Made-up traffic, for benches and tests: the kinds that tests/data/golden has, in any size.
//
// Thread-safety: pure functions of their arguments, equal on any machine.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "place/problem.h"

namespace kindred::place {

enum class TrafficKind {
  kAffinity,         // each expert has a source that sends it most
  kWeakAffinity,     // a little more than the others
  kBalancedSources,  // all sources alike
  kZipf,             // few experts get most, each leaning to a source
  kHot,              // two experts get a third
  kSparse,           // few tokens, most pairs of source and expert none
  kOneSource,        // only the first source sends
};
inline constexpr std::array kTrafficKinds = {TrafficKind::kAffinity, TrafficKind::kWeakAffinity,
                                             TrafficKind::kBalancedSources, TrafficKind::kZipf, TrafficKind::kHot,
                                             TrafficKind::kSparse, TrafficKind::kOneSource};
std::string_view to_string(TrafficKind kind);

struct TrafficShape {
  uint32_t layers = 1, sources = 2, experts = 8;
};

Traffic generate_traffic(TrafficKind kind, const TrafficShape& shape, uint64_t seed);

// The same experts, each cell of traffic up to `change` (0 to 1) more or less: the next window.
Traffic drifted(const Traffic& traffic, double change, uint64_t seed);

// Generated traffic on ranks at distance 0 or 1, linear so far. `ranks` divides shape.experts.
Problem generate_problem(TrafficKind kind, const TrafficShape& shape, uint32_t ranks, uint64_t seed);

}  // namespace kindred::place
