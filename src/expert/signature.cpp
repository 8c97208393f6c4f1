#include "expert/signature.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "base/result.h"

namespace kindred::expert {
namespace {

constexpr size_t kLanes = 8;                // independent sums, so that the compiler may use SIMD without reordering
constexpr double kDenominatorFloor = 1e-9;  // the reference's, inside each square root
constexpr float kLeastNorm = 1e-9F;         // the reference's

template <class T>
double dot_wide(const T* a, const T* b, size_t size) {
  std::array<double, kLanes> lanes{};
  size_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    for (size_t k = 0; k < kLanes; ++k) lanes[k] += static_cast<double>(a[i + k]) * static_cast<double>(b[i + k]);
  }
  for (; i < size; ++i) lanes[i % kLanes] += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

// Replaces values by average ranks, less their mean, so that Pearson's correlation of two such vectors
// is Spearman's. `order` is scratch.
void centred_ranks(std::vector<double>& values, std::vector<std::pair<double, uint32_t>>& order) {
  const size_t size = values.size();
  order.resize(size);
  for (size_t i = 0; i < size; ++i) order[i] = {values[i], static_cast<uint32_t>(i)};
  std::sort(order.begin(), order.end());
  const double mean = 0.5 * static_cast<double>(size - 1);
  for (size_t begin = 0; begin < size;) {
    size_t end = begin + 1;
    while (end < size && order[end].first == order[begin].first) ++end;
    const double rank = 0.5 * static_cast<double>(begin + end - 1) - mean;
    for (size_t i = begin; i < end; ++i) values[order[i].second] = rank;
    begin = end;
  }
}

double correlation(const std::vector<double>& a, const std::vector<double>& b) {
  const double ab = dot_wide(a.data(), b.data(), a.size());
  const double aa = dot_wide(a.data(), a.data(), a.size());
  const double bb = dot_wide(b.data(), b.data(), b.size());
  return ab / std::sqrt(aa * bb + kDenominatorFloor);
}

double cosine_distance(double product, double norm_a, double norm_b) {
  return 1.0 - product / std::sqrt(norm_a * norm_b + kDenominatorFloor);
}

// Inner products of a pair and squared norms of its two sides.
struct PairSums {
  std::vector<double> product, left, right;  // [P]
  explicit PairSums(size_t pairs) : product(pairs), left(pairs), right(pairs) {}
};

PairSums layer_sums(const MaskSample& sample, std::span<const RequestPair> pairs, size_t layer) {
  const size_t cells = sample.layers * sample.experts;
  const size_t requests = sample.prefill_counts.size() / cells;
  std::vector<float> signal(requests * sample.experts);
  std::vector<double> norms(requests);
  for (size_t i = 0; i < requests; ++i) {
    float* row = signal.data() + i * sample.experts;
    transform_cells(sample.transform, sample.profile(i), sample.idf, layer * sample.experts, {row, sample.experts});
    norms[i] = dot_wide(row, row, sample.experts);
  }
  PairSums sums(pairs.size());
  for (size_t p = 0; p < pairs.size(); ++p) {
    const auto [a, b] = pairs[p];
    sums.product[p] = dot_wide(signal.data() + a * sample.experts, signal.data() + b * sample.experts, sample.experts);
    sums.left[p] = norms[a];
    sums.right[p] = norms[b];
  }
  return sums;
}

// The centred ranks of the pairs' distances in decode, over all layers and without idf.
std::vector<double> target_ranks(const MaskSample& sample, std::span<const RequestPair> pairs,
                                 std::vector<std::pair<double, uint32_t>>& scratch) {
  const size_t cells = sample.layers * sample.experts;
  const uint32_t* counts = sample.decode_counts.data();
  std::vector<double> norms(sample.decode_counts.size() / cells);
  for (size_t i = 0; i < norms.size(); ++i) norms[i] = dot_wide(counts + i * cells, counts + i * cells, cells);
  std::vector<double> distance(pairs.size());
  for (size_t p = 0; p < pairs.size(); ++p) {
    const auto [a, b] = pairs[p];
    distance[p] = cosine_distance(dot_wide(counts + a * cells, counts + b * cells, cells), norms[a], norms[b]);
  }
  centred_ranks(distance, scratch);
  return distance;
}

// The first prefix with the highest rho.
void cut_at_peak(LayerMask& result) {
  const auto peak = std::max_element(result.rho.begin(), result.rho.end());
  result.kept = static_cast<size_t>(peak - result.rho.begin()) + 1;
  for (size_t s = 0; s < result.kept; ++s) result.mask[result.order[s]] = 1;
}

}  // namespace

std::vector<uint32_t> document_frequency(std::span<const uint32_t> counts, size_t cells) {
  KINDRED_CHECK(cells > 0 && counts.size() % cells == 0);
  std::vector<uint32_t> df(cells, 0);
  for (size_t begin = 0; begin < counts.size(); begin += cells) {
    for (size_t c = 0; c < cells; ++c) df[c] += counts[begin + c] != 0 ? 1 : 0;
  }
  return df;
}

std::vector<float> inverse_document_frequency(std::span<const uint32_t> df, size_t requests) {
  std::vector<float> idf(df.size());
  for (size_t c = 0; c < df.size(); ++c) {
    idf[c] = static_cast<float>(std::log((static_cast<double>(requests) + 1.0) / (static_cast<double>(df[c]) + 1.0)));
  }
  return idf;
}

bool build_signature(std::span<const uint32_t> counts, std::span<const float> idf, std::span<const uint8_t> layer_mask,
                     Signature& out) {
  return build_signature(Transform::kCountIdf, {.counts = counts}, idf, layer_mask, out);
}

bool build_signature(Transform transform, const PromptProfile& profile, std::span<const float> idf,
                     std::span<const uint8_t> layer_mask, Signature& out) {
  const size_t cells = uses_gates(transform) ? profile.gate.size() : profile.counts.size();
  KINDRED_CHECK(!layer_mask.empty() && cells % layer_mask.size() == 0 && (!uses_idf(transform) || cells == idf.size()));
  const size_t experts = cells / layer_mask.size();
  out.clear();
  for (size_t l = 0; l < layer_mask.size(); ++l) {
    if (layer_mask[l] == 0) continue;
    const size_t begin = out.size();
    out.resize(begin + experts);
    transform_cells(transform, profile, idf, l * experts, {out.data() + begin, experts});
  }
  const auto norm = static_cast<float>(std::sqrt(dot_wide(out.data(), out.data(), out.size())));
  const float scale = 1.0F / std::max(norm, kLeastNorm);
  for (float& value : out) value *= scale;
  return norm > kLeastNorm;
}

std::vector<RequestPair> draw_pairs(size_t requests, size_t drawn, Rng& rng) {
  std::vector<RequestPair> pairs;
  if (requests < 2) return pairs;
  pairs.reserve(drawn);
  for (size_t i = 0; i < drawn; ++i) {
    const auto a = static_cast<uint32_t>(rng.below(requests));
    const auto b = static_cast<uint32_t>(rng.below(requests));
    if (a != b) pairs.emplace_back(a, b);
  }
  return pairs;
}

LayerMask fit_layer_mask(const MaskSample& sample, std::span<const RequestPair> pairs) {
  const size_t layers = sample.layers;
  KINDRED_CHECK(layers > 0 && sample.experts > 0 && !pairs.empty());
  KINDRED_CHECK(sample.idf.size() == layers * sample.experts);
  KINDRED_CHECK(sample.prefill_counts.size() == sample.decode_counts.size());
  KINDRED_CHECK(!uses_gates(sample.transform) || sample.prefill_gate.size() == sample.decode_counts.size());
  std::vector<std::pair<double, uint32_t>> scratch;
  const std::vector<double> target = target_ranks(sample, pairs, scratch);
  std::vector<PairSums> per_layer;
  per_layer.reserve(layers);
  for (size_t l = 0; l < layers; ++l) per_layer.push_back(layer_sums(sample, pairs, l));

  LayerMask result;
  result.mask.assign(layers, 0);
  result.candidates.assign(layers * layers, std::numeric_limits<double>::quiet_NaN());
  std::vector<uint8_t> chosen(layers, 0);
  PairSums sums(pairs.size());  // over the chosen layers
  std::vector<double> distance(pairs.size());
  for (size_t step = 0; step < layers; ++step) {
    size_t best = layers;
    for (size_t l = 0; l < layers; ++l) {
      if (chosen[l] != 0) continue;
      const PairSums& add = per_layer[l];
      for (size_t p = 0; p < pairs.size(); ++p) {
        distance[p] =
            cosine_distance(sums.product[p] + add.product[p], sums.left[p] + add.left[p], sums.right[p] + add.right[p]);
      }
      centred_ranks(distance, scratch);
      const double rho = correlation(distance, target);
      result.candidates[step * layers + l] = rho;
      if (best == layers || rho > result.candidates[step * layers + best]) best = l;
    }
    chosen[best] = 1;
    result.order.push_back(static_cast<uint32_t>(best));
    result.rho.push_back(result.candidates[step * layers + best]);
    for (size_t p = 0; p < pairs.size(); ++p) {
      sums.product[p] += per_layer[best].product[p];
      sums.left[p] += per_layer[best].left[p];
      sums.right[p] += per_layer[best].right[p];
    }
  }
  cut_at_peak(result);
  return result;
}

}  // namespace kindred::expert
