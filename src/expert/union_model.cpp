#include "expert/union_model.h"

#include <algorithm>

#include "base/result.h"

namespace kindred::expert {

std::vector<float> inclusion_probabilities(std::span<const uint32_t> counts, uint64_t tokens) {
  KINDRED_CHECK(tokens > 0);
  std::vector<float> inclusion(counts.size());
  const double scale = 1.0 / static_cast<double>(tokens);
  for (size_t c = 0; c < counts.size(); ++c) {
    inclusion[c] = static_cast<float>(std::min(1.0, static_cast<double>(counts[c]) * scale));
  }
  return inclusion;
}

void ExpectedUnion::add(std::span<const float> inclusion) {
  KINDRED_CHECK(inclusion.size() == untouched_.size());
  for (size_t c = 0; c < untouched_.size(); ++c) untouched_[c] *= 1.0F - inclusion[c];
}

double ExpectedUnion::value() const {
  double sum = 0;
  for (const float q : untouched_) sum += 1.0 - static_cast<double>(q);
  return sum;
}

double ExpectedUnion::growth(std::span<const float> inclusion) const {
  KINDRED_CHECK(inclusion.size() == untouched_.size());
  double sum = 0;
  for (size_t c = 0; c < untouched_.size(); ++c) sum += static_cast<double>(untouched_[c] * inclusion[c]);
  return sum;
}

BatchUnion::BatchUnion(size_t cells, uint32_t batch)
    : cells_(cells), batch_(batch), means_((batch + size_t{1}) * cells, 0.0) {
  std::fill_n(means_.begin(), cells, 1.0);  // the empty product
}

void BatchUnion::add(std::span<const float> inclusion) {
  KINDRED_CHECK(inclusion.size() == cells_);
  ++requests_;
  const auto m = static_cast<double>(requests_);
  for (uint64_t j = std::min<uint64_t>(batch_, requests_); j > 0; --j) {
    const double keep = (m - static_cast<double>(j)) / m;
    const double take = static_cast<double>(j) / m;
    double* mean = means_.data() + j * cells_;
    const double* smaller = mean - cells_;
    for (size_t c = 0; c < cells_; ++c) {
      mean[c] = keep * mean[c] + take * (1.0 - static_cast<double>(inclusion[c])) * smaller[c];
    }
  }
}

double BatchUnion::value() const {
  const double* mean = means_.data() + std::min<uint64_t>(batch_, requests_) * cells_;
  double sum = 0;
  for (size_t c = 0; c < cells_; ++c) sum += 1.0 - mean[c];
  return sum;
}

}  // namespace kindred::expert
