// Least squares.
//
// Thread-safety: pure function.
#pragma once

#include <span>

namespace kindred::cli {

struct LineFit {
  double a = 0, b = 0;  // y = a + b x
  double r2 = 0;        // share of y's variance explained; 0 if y does not vary
};

// x and y of one length. With fewer than two different x: b = 0, a = mean.
LineFit fit_line(std::span<const double> x, std::span<const double> y);

}  // namespace kindred::cli
