// The two leading principal components of a cloud of points, to draw it.
//
// Power iteration on the covariance, which is applied (Xᵀ(Xv), O(n d)) and never formed; the second component
// is kept orthogonal to the first. For a picture: a component is as exact as its eigenvalue is apart from the
// next, and stops after kPcaIterations at the latest.
//
// Thread-safety: pure functions; equal input, equal result.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "expert/kmeans.h"

namespace kindred::expert {

inline constexpr uint32_t kPcaIterations = 200;

struct Pca {
  std::vector<double> mean;                                    // [d]
  std::array<std::vector<double>, 2> component;                // [d] each: of unit length, or zero if nothing varies
  std::array<double, 2> share = {0, 0};                        // of the total variance
  std::array<double, 2> at(std::span<const float> row) const;  // coordinates of a point; `row`: [d]
};

// points.size() > 0. The largest coordinate of each component is positive, so that pictures do not flip.
Pca principal_components(const Points& points);

}  // namespace kindred::expert
