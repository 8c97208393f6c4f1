#include "expert/pca.h"

#include <algorithm>
#include <cmath>

#include "base/rng.h"

namespace kindred::expert {
namespace {

constexpr double kSettledCosine = 1e-12;  // 1 - |cosine| of two successive directions
constexpr double kNoVariance = 1e-12;     // of the total: floats of unit vectors are no more exact than that

double inner(std::span<const double> a, std::span<const double> b) {
  double sum = 0;
  for (size_t j = 0; j < a.size(); ++j) sum += a[j] * b[j];
  return sum;
}

// Makes `direction` orthogonal to the unit vector `other`, which may be empty, and of unit length; returns
// the length it had.
double straighten(std::vector<double>& direction, std::span<const double> other) {
  if (!other.empty()) {
    const double along = inner(direction, other);
    for (size_t j = 0; j < direction.size(); ++j) direction[j] -= along * other[j];
  }
  const double length = std::sqrt(inner(direction, direction));
  if (length > 0) {
    for (double& x : direction) x /= length;
  }
  return length;
}

// Sum over the points of (x - mean) ((x - mean) · v).
std::vector<double> apply_covariance(const Points& points, std::span<const double> mean, std::span<const double> v) {
  std::vector<double> out(points.dims, 0.0);
  const double of_mean = inner(mean, v);
  double total = 0;
  for (size_t i = 0; i < points.size(); ++i) {
    const std::span<const float> row = points.row(i);
    double along = -of_mean;
    for (size_t j = 0; j < points.dims; ++j) along += static_cast<double>(row[j]) * v[j];
    total += along;
    for (size_t j = 0; j < points.dims; ++j) out[j] += along * static_cast<double>(row[j]);
  }
  for (size_t j = 0; j < points.dims; ++j) out[j] -= total * mean[j];
  return out;
}

// Returns the variance along the component, which is written to `v`; v is zero if there is none.
double leading_component(const Points& points, std::span<const double> mean, std::span<const double> other,
                         double total, uint64_t seed, std::vector<double>& v) {
  Rng rng(seed);
  v.resize(points.dims);
  for (double& x : v) x = rng.uniform() - 0.5;
  double variance = 0;
  if (straighten(v, other) > 0) {
    for (uint32_t iteration = 0; iteration < kPcaIterations; ++iteration) {
      std::vector<double> next = apply_covariance(points, mean, v);
      variance = straighten(next, other);
      const double turned = 1 - std::abs(inner(next, v));
      v = std::move(next);
      if (turned < kSettledCosine) break;
    }
  }
  if (!(variance > kNoVariance * total) || total == 0) {
    std::fill(v.begin(), v.end(), 0.0);
    return 0;
  }
  const auto largest =
      std::max_element(v.begin(), v.end(), [](double a, double b) { return std::abs(a) < std::abs(b); });
  if (*largest < 0) {
    for (double& x : v) x = -x;
  }
  return variance;
}

}  // namespace

std::array<double, 2> Pca::at(std::span<const float> row) const {
  KINDRED_CHECK(row.size() == mean.size());
  std::array<double, 2> out = {0, 0};
  for (size_t c = 0; c < 2; ++c) {
    for (size_t j = 0; j < row.size(); ++j) out[c] += (static_cast<double>(row[j]) - mean[j]) * component[c][j];
  }
  return out;
}

Pca principal_components(const Points& points) {
  KINDRED_CHECK(points.dims > 0 && points.size() > 0);
  Pca pca;
  pca.mean.assign(points.dims, 0.0);
  for (size_t i = 0; i < points.size(); ++i) {
    for (size_t j = 0; j < points.dims; ++j) pca.mean[j] += static_cast<double>(points.row(i)[j]);
  }
  for (double& x : pca.mean) x /= static_cast<double>(points.size());
  double total = 0;
  for (size_t i = 0; i < points.size(); ++i) {
    for (size_t j = 0; j < points.dims; ++j) {
      const double off = static_cast<double>(points.row(i)[j]) - pca.mean[j];
      total += off * off;
    }
  }
  for (size_t c = 0; c < 2; ++c) {
    const std::span<const double> other = c == 0 ? std::span<const double>() : pca.component[0];
    const double variance = leading_component(points, pca.mean, other, total, c + 1, pca.component[c]);
    pca.share[c] = total > 0 ? variance / total : 0;
  }
  return pca;
}

}  // namespace kindred::expert
