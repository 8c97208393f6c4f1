// The union model: how many distinct experts a decode batch is expected to touch, |U|, which is what a
// decode step's time follows (step = a + b * |U| per layer).
//
// A request's inclusion probability p[l, e] = c[l, e] / T is the share of its tokens that chose the
// expert; requests of a batch are taken as independent, so expert e of layer l stays untouched with
// probability q = product of (1 - p), and E|U| = sum of (1 - q).
//
// Unit: experts, summed over layers; divide by L for a mean per layer.
// Thread-safety: pure functions and a plain value.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace kindred::expert {

// p of one request, [L * E]. tokens > 0.
std::vector<float> inclusion_probabilities(std::span<const uint32_t> counts, uint64_t tokens);

// A batch that grows. O(L * E) per call.
class ExpectedUnion {
 public:
  explicit ExpectedUnion(size_t cells) : untouched_(cells, 1.0F) {}

  void add(std::span<const float> inclusion);
  double value() const;                                   // E|U|
  double growth(std::span<const float> inclusion) const;  // by how much add() would raise value()

 private:
  std::vector<float> untouched_;  // q
};

// The mean of E|U| over all batches of `batch` different requests among those added: what a batch of
// fresh requests from the same source is expected to touch, without drawing any (batches with repeats
// would look smaller than real ones). O(batch * L * E) per add.
//
// The mean over j-subsets of the product of q obeys, when the m-th request comes,
//   mean_j <- (m - j) / m * mean_j + j / m * q * mean_{j-1},
// because a share j / m of the j-subsets contains it.
class BatchUnion {
 public:
  BatchUnion(size_t cells, uint32_t batch);

  void add(std::span<const float> inclusion);
  // At most `batch` requests make up a batch if fewer were added.
  double value() const;
  uint64_t requests() const { return requests_; }

 private:
  size_t cells_;
  uint32_t batch_;
  uint64_t requests_ = 0;
  std::vector<double> means_;  // [batch + 1, cells]
};

}  // namespace kindred::expert
