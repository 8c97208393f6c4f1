#include "expert/kmeans.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/rng.h"
#include "expert/assign.h"
#include "expert/assign_weighted.h"
#include "expert/signature.h"

namespace kindred::expert {
namespace {

// numpy.allclose's defaults, the reference's convergence test.
constexpr float kAbsolute = 1e-8F;
constexpr float kRelative = 1e-5F;
constexpr double kMostTolerance = 1000;  // beyond any number of clusters that such a cap could matter to

bool normalise(std::span<float> row) {
  double norm = 0;
  for (const float x : row) norm += static_cast<double>(x) * static_cast<double>(x);
  if (!(norm > 0)) return false;
  const auto scale = static_cast<float>(1.0 / std::sqrt(norm));
  for (float& x : row) x *= scale;
  return true;
}

std::vector<double> cosine_distances(const Points& points, std::span<const float> centroids) {
  const size_t clusters = centroids.size() / points.dims;
  std::vector<double> cost(points.size() * clusters);
  std::vector<float> cosines(clusters);
  for (size_t i = 0; i < points.size(); ++i) {
    dots(points.row(i), centroids, cosines);
    for (size_t k = 0; k < clusters; ++k) cost[i * clusters + k] = 1.0 - static_cast<double>(cosines[k]);
  }
  return cost;
}

std::vector<uint32_t> equal_caps(size_t points, size_t clusters) {
  return std::vector<uint32_t>(clusters, static_cast<uint32_t>((points + clusters - 1) / clusters));
}

// The assignment step: fills `assignment` and returns its cost. Ties go to the lower cluster.
double assign_points(std::span<const double> costs, size_t clusters, const Capacity& capacity,
                     std::vector<uint32_t>& assignment) {
  const size_t size = costs.size() / clusters;
  if (capacity.balance == Balance::kWork) {
    const uint64_t sum = std::accumulate(capacity.weights.begin(), capacity.weights.end(), uint64_t{0});
    const uint64_t least = (sum + clusters - 1) / clusters;
    const double share = static_cast<double>(sum) / static_cast<double>(clusters) * (1 + capacity.tolerance);
    Result<WeightedAssignment> assigned =
        assign_weighted(costs, capacity.weights, clusters, std::max(least, static_cast<uint64_t>(share)));
    KINDRED_CHECK(assigned.ok());  // kmeans_from has checked the weights
    assignment = std::move(assigned->column);
    return assigned->total;
  }
  const std::vector<uint32_t> caps = capacity.balance == Balance::kCount
                                         ? equal_caps(size, clusters)
                                         : std::vector<uint32_t>(clusters, static_cast<uint32_t>(size));
  Result<Assignment> optimum = assign_rows(costs, caps);
  KINDRED_CHECK(optimum.ok());  // finite costs, and caps that hold all points
  assignment = std::move(optimum->column);
  return optimum->total;
}

Status check_capacity(const Points& points, const Capacity& capacity) {
  if (capacity.balance != Balance::kWork) return {};
  if (capacity.weights.size() != points.size()) {
    return invalid(fmt::format("k-means: {} weights for {} points", capacity.weights.size(), points.size()), "weights");
  }
  if (std::find(capacity.weights.begin(), capacity.weights.end(), 0U) != capacity.weights.end()) {
    return invalid("k-means: a weight is 0; accepted: 1 or more", "weights");
  }
  if (!(capacity.tolerance >= 0 && capacity.tolerance <= kMostTolerance)) {
    return invalid(fmt::format("k-means: tolerance {}; accepted: 0 to {}", capacity.tolerance, kMostTolerance),
                   "tolerance");
  }
  return {};
}

bool settled(std::span<const float> before, std::span<const float> after) {
  for (size_t i = 0; i < before.size(); ++i) {
    if (std::abs(after[i] - before[i]) > kAbsolute + kRelative * std::abs(before[i])) return false;
  }
  return true;
}

std::vector<float> draw_starts(const Points& points, size_t clusters, Rng& rng) {
  const size_t size = points.size();
  std::vector<float> starts;
  starts.reserve(clusters * points.dims);
  std::vector<double> distance(size, 2.0);  // to the nearest start: more than any cosine distance here
  size_t next = rng.below(size);
  for (;;) {
    const std::span<const float> start = points.row(next);
    starts.insert(starts.end(), start.begin(), start.end());
    if (starts.size() == clusters * points.dims) return starts;
    double total = 0;
    for (size_t i = 0; i < size; ++i) {
      distance[i] = std::min(distance[i], std::max(0.0, 1.0 - static_cast<double>(dot(points.row(i), start))));
      total += distance[i];
    }
    // With fewer distinct points than clusters nothing is left to draw by distance.
    next = rng.below(size);
    double at = rng.uniform() * total;
    for (size_t i = 0; i < size && total > 0; ++i) {
      at -= distance[i];
      if (at < 0) {
        next = i;
        break;
      }
    }
  }
}

}  // namespace

std::string_view to_string(Balance balance) {
  switch (balance) {
    case Balance::kNone: return "none";
    case Balance::kCount: return "count";
    case Balance::kWork: return "work";
  }
  return "";
}

double kmeans_step(const Points& points, std::vector<float>& centroids, std::vector<uint32_t>& assignment,
                   const Capacity& capacity) {
  const size_t clusters = centroids.size() / points.dims;
  const double cost = assign_points(cosine_distances(points, centroids), clusters, capacity, assignment);

  std::vector<double> sums(centroids.size(), 0.0);
  for (size_t i = 0; i < points.size(); ++i) {
    double* sum = sums.data() + assignment[i] * points.dims;
    const std::span<const float> row = points.row(i);
    for (size_t j = 0; j < points.dims; ++j) sum[j] += static_cast<double>(row[j]);
  }
  for (size_t k = 0; k < clusters; ++k) {
    const std::span<const double> sum(sums.data() + k * points.dims, points.dims);
    double norm = 0;
    for (const double x : sum) norm += x * x;
    if (!(norm > 0)) continue;  // no points, or points that cancel out: keep the old centroid
    const double scale = 1.0 / std::sqrt(norm);
    for (size_t j = 0; j < points.dims; ++j) centroids[k * points.dims + j] = static_cast<float>(sum[j] * scale);
  }
  return cost;
}

Result<Clustering> kmeans_from(const Points& points, std::vector<float> centroids, uint32_t max_iterations,
                               const Capacity& capacity) {
  const size_t dims = points.dims;
  if (dims == 0 || points.data.empty() || points.data.size() % dims != 0) return invalid("k-means: no points");
  if (centroids.empty() || centroids.size() % dims != 0) return invalid("k-means: no centroids of the points' length");
  const auto finite = [](float x) { return std::isfinite(x); };
  if (!std::all_of(points.data.begin(), points.data.end(), finite) ||
      !std::all_of(centroids.begin(), centroids.end(), finite)) {
    return invalid("k-means: a coordinate is not finite");
  }
  if (Status good = check_capacity(points, capacity); !good) return std::move(good).error();
  for (size_t begin = 0; begin < centroids.size(); begin += dims) normalise({centroids.data() + begin, dims});

  Clustering result;
  result.centroids = std::move(centroids);
  std::vector<float> before;
  while (!result.converged && result.iterations < max_iterations) {
    before = result.centroids;
    kmeans_step(points, result.centroids, result.assignment, capacity);
    ++result.iterations;
    result.converged = settled(before, result.centroids);
  }
  result.assignment.resize(points.size(), 0);  // max_iterations 0
  for (size_t i = 0; i < points.size(); ++i) {
    const std::span<const float> own(result.centroids.data() + result.assignment[i] * dims, dims);
    result.cost += 1.0 - static_cast<double>(dot(points.row(i), own));
  }
  return result;
}

Result<Clustering> balanced_spherical_kmeans(const Points& points, const KmeansOptions& options) {
  if (points.dims == 0 || points.data.empty() || points.data.size() % points.dims != 0) {
    return invalid("k-means: no points");
  }
  if (options.clusters == 0 || options.clusters > points.size()) {
    return invalid(fmt::format("k-means: {} clusters of {} points; accepted: 1 to {}", options.clusters, points.size(),
                               points.size()),
                   "clusters");
  }
  Rng rng(options.seed);
  const auto start = [&] {
    return kmeans_from(points, draw_starts(points, options.clusters, rng), options.max_iterations, options.capacity);
  };
  Result<Clustering> best = start();
  if (options.on_restart) options.on_restart(1);
  for (uint32_t restart = 1; restart < options.restarts && best.ok(); ++restart) {
    Result<Clustering> other = start();
    if (options.on_restart) options.on_restart(restart + 1);
    if (other.ok() && other->cost < best->cost) best = std::move(other);
  }
  return best;
}

}  // namespace kindred::expert
