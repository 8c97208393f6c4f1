#include "cli/line_fit.h"

#include "base/result.h"

namespace kindred::cli {

LineFit fit_line(std::span<const double> x, std::span<const double> y) {
  KINDRED_CHECK(x.size() == y.size());
  LineFit fit;
  if (x.empty()) return fit;
  const auto n = static_cast<double>(x.size());
  double mean_x = 0, mean_y = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    mean_x += x[i] / n;
    mean_y += y[i] / n;
  }
  double xx = 0, xy = 0, yy = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    xx += (x[i] - mean_x) * (x[i] - mean_x);
    xy += (x[i] - mean_x) * (y[i] - mean_y);
    yy += (y[i] - mean_y) * (y[i] - mean_y);
  }
  fit.b = xx > 0 ? xy / xx : 0;
  fit.a = mean_y - fit.b * mean_x;
  fit.r2 = xx > 0 && yy > 0 ? xy * xy / (xx * yy) : 0;
  return fit;
}

}  // namespace kindred::cli
