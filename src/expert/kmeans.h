// Balanced spherical k-means: clusters of unit vectors of at most ceil(n / k) points each, every
// assignment step the exact optimum of total cosine distance under that cap.
//
// Reference: casys-kaist/ELDR eldr/serving/clustering.py (balanced_spherical_kmeans).
//
// Shapes: points [n, d], centroids [k, d], row-major floats.
// Thread-safety: pure functions.
#pragma once

#include <cstdint>
#include <span>
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

// One iteration: the optimal assignment to `centroids` under the cap (its cost is returned), then
// `centroids` become the normalised means of their points; a cluster without points keeps its own.
// Centroids must have unit length. `assignment` is overwritten.
double kmeans_step(const Points& points, std::vector<float>& centroids, std::vector<uint32_t>& assignment);

// From given centroids (normalised first) until no element moves by more than 1e-8 + 1e-5 * |old|, or
// `max_iterations`. Error: kInvalid for empty or inconsistent shapes.
Result<Clustering> kmeans_from(const Points& points, std::vector<float> centroids, uint32_t max_iterations = 50);

struct KmeansOptions {
  uint32_t clusters = 1;  // 1..n
  uint32_t restarts = 8;  // the cheapest result wins, the first if tied
  uint32_t max_iterations = 50;
  uint64_t seed = 1;
};

// k-means++ seeding: each further start is drawn with probability proportional to the cosine distance
// to the nearest start so far.
Result<Clustering> balanced_spherical_kmeans(const Points& points, const KmeansOptions& options);

}  // namespace kindred::expert
