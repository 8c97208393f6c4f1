// For tests: made-up requests of a few domains, each with its own favourite experts.
#pragma once

#include <cstdint>
#include <string>

#include "base/rng.h"
#include "expert/activations.h"

namespace kindred::expert {

// Counts of `tokens` tokens. A token picks its top_k experts from the `domain`-th window of E / 4
// experts (windows do not overlap for domains 0 to 3), or from all experts for one token in four.
inline ExpertCounts made_up_counts(const ExpertShape& shape, uint32_t domain, uint32_t tokens, Rng& rng) {
  ExpertCounts counts(shape);
  counts.tokens = tokens;
  const uint32_t window = shape.experts / 4;
  for (size_t l = 0; l < shape.layers.size(); ++l) {
    for (uint32_t t = 0; t < tokens; ++t) {
      const bool anywhere = rng.below(4) == 0;
      const auto first = static_cast<uint32_t>(rng.below(anywhere ? shape.experts : window));
      for (uint32_t k = 0; k < shape.top_k; ++k) {
        const uint32_t e = anywhere ? (first + k) % shape.experts : domain % 4 * window + (first + k) % window;
        ++counts.data[l * shape.experts + e];
      }
    }
  }
  return counts;
}

// What a softmax gate that chose those experts might have added up to: most of the mass where the counts
// are, the rest spread evenly.
inline std::vector<float> made_up_gates(const ExpertCounts& counts) {
  std::vector<float> gate;
  const float rest = 0.2F * static_cast<float>(counts.tokens) / static_cast<float>(counts.shape.experts);
  for (const uint32_t count : counts.data) {
    gate.push_back(0.8F * static_cast<float>(count) / static_cast<float>(counts.shape.top_k) + rest);
  }
  return gate;
}

inline Activations made_up_activations(size_t requests, uint32_t domains, uint64_t seed = 1, bool gates = false) {
  Rng rng(seed);
  Activations out;
  out.model = "made-up";
  out.model_fingerprint = "f00d";
  const ExpertShape shape{.layers = {0, 1, 3}, .experts = 16, .top_k = 2};
  for (size_t i = 0; i < requests; ++i) {
    const auto domain = static_cast<uint32_t>(i % domains);
    const ExpertCounts prefill = made_up_counts(shape, domain, 20 + static_cast<uint32_t>(rng.below(30)), rng);
    const ExpertCounts decode = made_up_counts(shape, domain, 10 + static_cast<uint32_t>(rng.below(10)), rng);
    const std::vector<float> gate = gates ? made_up_gates(prefill) : std::vector<float>();
    KINDRED_CHECK(out.append(prefill, &decode, "domain " + std::to_string(domain), gate).ok());
  }
  return out;
}

}  // namespace kindred::expert
