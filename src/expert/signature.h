// From expert counts to a signature: a transform (count times idf, unless another is asked for), only the
// layers of the mask, then one L2 norm over all of them. Two requests with close signatures tend to use
// the same experts in decode.
//
// Reference: casys-kaist/ELDR eldr/experiments/runner/fit.py (idf, greedy_mask) and
// eldr/serving/clustering.py (build_signature).
//
// Shapes: counts are [N, L, E] row-major, idf [L, E], a signature [kept layers * E].
// Thread-safety: pure functions and plain values.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "base/rng.h"
#include "expert/inner_product.h"
#include "expert/transform.h"

namespace kindred::expert {

// D floats of unit length, or all zero when every expert the request used has weight 0.
using Signature = std::vector<float>;

// [cells]: how many of the requests have a non-zero count there. counts: [N * cells].
std::vector<uint32_t> document_frequency(std::span<const uint32_t> counts, size_t cells);

// ln((requests + 1) / (df + 1)): 0 for an expert that every request uses.
std::vector<float> inverse_document_frequency(std::span<const uint32_t> df, size_t requests);

// `counts`, `idf`: [L * E]; `layer_mask`: [L] of 0 or 1. Writes kept * E floats to `out`, resized as
// needed. False: the result is the zero vector.
bool build_signature(std::span<const uint32_t> counts, std::span<const float> idf, std::span<const uint8_t> layer_mask,
                     Signature& out);
// The same under any transform; `profile` must hold what it needs.
bool build_signature(Transform transform, const PromptProfile& profile, std::span<const float> idf,
                     std::span<const uint8_t> layer_mask, Signature& out);

using RequestPair = std::pair<uint32_t, uint32_t>;

// `drawn` uniform pairs of [0, requests); those of a request with itself are dropped.
std::vector<RequestPair> draw_pairs(size_t requests, size_t drawn, Rng& rng);

// The result of the greedy choice of layers. Layers are rows of the counts here, not model layers.
struct LayerMask {
  std::vector<uint32_t> order;     // [L], as added
  std::vector<double> rho;         // [L], Spearman's rho after each addition
  std::vector<double> candidates;  // [L * L], step by layer: rho had it been added; NaN: already chosen
  size_t kept = 0;                 // length of the first prefix with the highest rho
  std::vector<uint8_t> mask;       // [L], 1 for the layers of that prefix

  double peak_rho() const { return kept == 0 ? 0 : rho[kept - 1]; }
};

// Counts of N requests, what the mask is fitted on. Borrowed.
struct MaskSample {
  std::span<const uint32_t> prefill_counts;  // [N, L, E]
  std::span<const uint32_t> decode_counts;   // [N, L, E]
  std::span<const float> idf;                // [L, E]
  size_t layers = 0, experts = 0;
  Transform transform = Transform::kCountIdf;
  std::span<const float> prefill_gate = {};  // [N, L, E], for the transforms that use gates

  PromptProfile profile(size_t i) const {
    const size_t cells = layers * experts;
    return {.counts = prefill_counts.subspan(i * cells, cells),
            .gate = prefill_gate.empty() ? prefill_gate : prefill_gate.subspan(i * cells, cells)};
  }
};

// Adds layers one by one, each time the one that makes the distances between masked signatures agree
// best (Spearman) with the distances between raw decode profiles; ties go to the lowest row. Ranks are
// average ranks. `pairs` must not be empty. O(P * L * E + L^2 * P log P).
LayerMask fit_layer_mask(const MaskSample& sample, std::span<const RequestPair> pairs);

}  // namespace kindred::expert
