#include "sim/nelder_mead.h"

#include <algorithm>

namespace kindred::sim {

Minimum nelder_mead(const std::function<double(std::span<const double>)>& f, std::span<const double> start,
                    std::span<const double> scale, int iterations) {
  const size_t n = start.size();
  const auto vertex = [&f](std::vector<double> at) {
    const double value = f(at);
    return Minimum{std::move(at), value};
  };
  std::vector<Minimum> simplex = {vertex({start.begin(), start.end()})};
  for (size_t i = 0; i < n; ++i) {
    std::vector<double> at(start.begin(), start.end());
    at[i] += scale[i];
    simplex.push_back(vertex(std::move(at)));
  }
  const auto better = [](const Minimum& a, const Minimum& b) { return a.value < b.value; };
  std::stable_sort(simplex.begin(), simplex.end(), better);
  for (int iteration = 0; iteration < iterations; ++iteration) {
    std::vector<double> centre(n, 0);
    for (size_t v = 0; v < n; ++v) {
      for (size_t j = 0; j < n; ++j) centre[j] += simplex[v].at[j] / static_cast<double>(n);
    }
    // A point on the line from the centre of the others through the worst one.
    const auto along = [&](double t) {
      std::vector<double> at(n);
      for (size_t j = 0; j < n; ++j) at[j] = centre[j] + t * (simplex[n].at[j] - centre[j]);
      return vertex(std::move(at));
    };
    Minimum next = along(-1);
    if (next.value < simplex[0].value) {
      Minimum further = along(-2);
      if (further.value < next.value) next = std::move(further);
    } else if (next.value >= simplex[n - 1].value) {
      next = along(next.value < simplex[n].value ? -0.5 : 0.5);
      if (next.value >= simplex[n].value) {
        for (size_t v = 1; v <= n; ++v) {
          std::vector<double> at(n);
          for (size_t j = 0; j < n; ++j) at[j] = (simplex[v].at[j] + simplex[0].at[j]) / 2;
          simplex[v] = vertex(std::move(at));
        }
        std::stable_sort(simplex.begin(), simplex.end(), better);
        continue;
      }
    }
    simplex[n] = std::move(next);
    std::stable_sort(simplex.begin(), simplex.end(), better);
  }
  return simplex[0];
}

}  // namespace kindred::sim
