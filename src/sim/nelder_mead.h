// Minimising a function of a few variables without derivatives (Nelder and Mead, The Computer Journal 7, 1965).
//
// Thread-safety: pure function.
#pragma once

#include <functional>
#include <span>
#include <vector>

namespace kindred::sim {

struct Minimum {
  std::vector<double> at;
  double value = 0;
};

// From `start`, first steps of `scale` (not 0). Ends after `iterations`; where `f` is high enough outside, it
// bounds the search. Deterministic.
Minimum nelder_mead(const std::function<double(std::span<const double>)>& f, std::span<const double> start,
                    std::span<const double> scale, int iterations);

}  // namespace kindred::sim
