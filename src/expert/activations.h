// Recorded expert counts of many requests: what `record` writes and `fit` reads.
//
// File (safetensors): prefill_counts u32 [N, L, E], decode_counts u32 [N, L, E] (optional),
// prefill_gate f32 [N, L, E] (optional: gate probabilities summed over the prompt's tokens),
// prompt_tokens u32 [N], decode_tokens u32 [N]; other tensors are ignored. Metadata (strings): format
// "kindred.activations.v1", model, model_fingerprint, layers (JSON list of model layer indices), top_k,
// domains (JSON list of N strings; optional). Every prefill row sums to prompt_tokens * top_k, every
// decode row to decode_tokens * top_k: decode_tokens counts generated tokens that were fed back (the
// last one never is). A gate sum is finite and between 0 and prompt_tokens, but for rounding.
//
// Thread-safety: a plain value.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "expert/counts.h"
#include "expert/transform.h"

namespace kindred::expert {

struct Activations {
  std::string model;              // for people
  std::string model_fingerprint;  // may be empty: unknown
  ExpertShape shape;
  std::vector<uint32_t> prompt_tokens;   // [N], > 0
  std::vector<uint32_t> decode_tokens;   // [N]
  std::vector<uint32_t> prefill_counts;  // [N, L, E]
  std::vector<uint32_t> decode_counts;   // [N, L, E], or empty: not recorded
  std::vector<float> prefill_gate;       // [N, L, E], or empty: not recorded
  std::vector<std::string> domains;      // [N], or empty: no labels

  size_t requests() const { return prompt_tokens.size(); }
  bool has_decode() const { return !decode_counts.empty(); }
  bool has_gates() const { return !prefill_gate.empty(); }
  bool has_domains() const { return !domains.empty(); }
  std::span<const uint32_t> prefill(size_t i) const { return request_cells(prefill_counts, i); }
  std::span<const uint32_t> decode(size_t i) const { return request_cells(decode_counts, i); }
  std::span<const float> gate(size_t i) const { return {prefill_gate.data() + i * shape.cells(), shape.cells()}; }
  PromptProfile profile(size_t i) const {
    return {.counts = prefill(i), .gate = has_gates() ? gate(i) : std::span<const float>()};
  }

  // For `record`: the first request sets the shape, and whether there are decode counts, labels
  // and gate sums; later ones must agree. `decode` null: not recorded. `domain` empty: no label.
  // `prefill_gate`: [L * E], or empty: not recorded. Error: kInvalid, and nothing was appended.
  Status append(const ExpertCounts& prefill, const ExpertCounts* decode, std::string_view domain,
                std::span<const float> prefill_gate = {});

  // Checks every size, row sum and gate sum. Error: kInvalid, naming the request and layer.
  Status check() const;

 private:
  std::span<const uint32_t> request_cells(const std::vector<uint32_t>& counts, size_t i) const {
    return {counts.data() + i * shape.cells(), shape.cells()};
  }
};

// Error: kIo, kCorrupt (not safetensors), kInvalid (not an activations file, inconsistent, or empty).
Result<Activations> load_activations(const std::string& path);
Result<Activations> activations_from_bytes(std::string bytes);

// Atomic (written beside the target and renamed). Error: kInvalid if check() fails, kIo.
Status save_activations(const Activations& activations, const std::string& path);

}  // namespace kindred::expert
