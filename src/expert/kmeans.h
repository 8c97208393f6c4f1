// Balanced spherical k-means: clusters of unit vectors of at most ceil(n / k) points each, every
// assignment step the exact optimum of total cosine distance under that cap. Or balanced by the points'
// weights, or, for comparison, not at all.
//
// Reference: casys-kaist/ELDR eldr/serving/clustering.py (balanced_spherical_kmeans).
//
// Shapes: points [n, d], centroids [k, d], row-major floats.
// Thread-safety: pure functions.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace kindred::expert {

struct Points {
  std::span<const float> data;  // [n * d]; rows of unit length, or zero
  size_t dims = 0;              // d > 0

  size_t size() const { return data.size() / dims; }
  std::span<const float> row(size_t i) const { return data.subspan(i * dims, dims); }
};

struct Clustering {
  std::vector<float> centroids;      // [k * d], unit length
  std::vector<uint32_t> assignment;  // [n], of the last iteration
  double cost = 0;                   // total cosine distance of that assignment to these centroids
  uint32_t iterations = 0;           // the one that found convergence included
  bool converged = false;
};

enum class Balance { kNone, kCount, kWork };
std::string_view to_string(Balance balance);  // "none", "count", "work"

// What an assignment step may give a cluster.
//   kNone: anything; vanilla spherical k-means.
//   kCount: ceil(n / k) points.
//   kWork: (1 + tolerance) * the mean weight of a cluster, as far as assign_weighted() guarantees it.
struct Capacity {
  Balance balance = Balance::kCount;
  std::span<const uint32_t> weights = {};  // kWork: [n], each > 0. Borrowed.
  double tolerance = 0.05;                 // kWork: >= 0
};

// One iteration: the optimal assignment to `centroids` under the cap (its cost is returned), then
// `centroids` become the normalised means of their points; a cluster without points keeps its own.
// Centroids must have unit length. `assignment` is overwritten.
double kmeans_step(const Points& points, std::vector<float>& centroids, std::vector<uint32_t>& assignment,
                   const Capacity& capacity = {});

// From given centroids (normalised first) until no element moves by more than 1e-8 + 1e-5 * |old|, or
// `max_iterations`. Error: kInvalid for empty or inconsistent shapes.
Result<Clustering> kmeans_from(const Points& points, std::vector<float> centroids, uint32_t max_iterations = 50,
                               const Capacity& capacity = {});

struct KmeansOptions {
  uint32_t clusters = 1;  // 1..n
  uint32_t restarts = 8;  // the cheapest result wins, the first if tied
  uint32_t max_iterations = 50;
  uint64_t seed = 1;
  Capacity capacity = {};
  std::function<void(size_t done)> on_restart = {};  // after each start
};

// k-means++ seeding: each further start is drawn with probability proportional to the cosine distance
// to the nearest start so far.
Result<Clustering> balanced_spherical_kmeans(const Points& points, const KmeansOptions& options);

}  // namespace kindred::expert
