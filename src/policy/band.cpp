#include "policy/band.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/result.h"

namespace kindred::policy {

std::vector<uint32_t> locality_band(std::span<const float> scores, std::span<const uint32_t> eligible, float tau,
                                    TiedSeconds seconds) {
  std::vector<uint32_t> band;
  if (eligible.empty()) return band;
  uint32_t best = eligible.front();
  for (const uint32_t w : eligible) {
    if (scores[w] > scores[best]) best = w;
  }
  const float edge = scores[best] - tau;  // in float32 on purpose
  for (const uint32_t w : eligible) {
    if (scores[w] >= edge) band.push_back(w);
  }
  if (band.size() != 1 || eligible.size() == 1 || !(tau > 0)) return band;
  uint32_t second = best;
  for (const uint32_t w : eligible) {
    if (w != best && (second == best || scores[w] > scores[second])) second = w;
  }
  for (const uint32_t w : eligible) {
    if (w == second || (seconds == TiedSeconds::kAll && w != best && scores[w] >= scores[second])) band.push_back(w);
  }
  std::sort(band.begin(), band.end());
  return band;
}

double load_limit(std::span<const WorkerView> workers, double cap, double request_load) {
  constexpr double kNone = std::numeric_limits<double>::infinity();
  if (!(cap > 0) || std::isinf(cap)) return kNone;
  double sum = request_load;
  size_t available = 0;
  for (const WorkerView& worker : workers) {
    if (!worker.available) continue;
    sum += worker.load;
    ++available;
  }
  if (available == 0) return kNone;
  const double limit = cap * sum / static_cast<double>(available);
  return request_load > 0 ? std::ceil(limit / request_load) * request_load : limit;
}

}  // namespace kindred::policy
