// Sees which experts llama.cpp selects while it evaluates a batch and, on request, the gate's probabilities.
//
// Thread-safety: none; belongs to the engine's thread. Must outlive the llama_context it is given to.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "expert/counts.h"

struct ggml_tensor;

namespace kindred::engine {

class ExpertCapture {
 public:
  // `most_tokens`: the largest batch.
  ExpertCapture(expert::ExpertShape shape, uint32_t most_tokens);

  // For llama_context_params: cb_eval and its user data.
  static bool on_tensor(ggml_tensor* tensor, bool ask, void* self);

  // Before llama_decode of `tokens` tokens. `gates`: also take the probabilities of all experts, which costs
  // a synchronisation more per layer.
  void begin(uint32_t tokens, bool gates = false);
  // After llama_decode returned 0, never otherwise: an aborted batch leaves rows of tokens that have no
  // KV. False: some layer did not give one row per token, and the rows must not be used.
  bool complete() const;

  // The same for the probabilities. False also if they are none (negative, as where the gate's softmax comes
  // after the selection) or were not asked for.
  bool gates_complete() const;

  const expert::ExpertShape& shape() const { return shape_; }
  // The experts of one token of the batch in row `layer` of the shape.
  std::span<const uint16_t> selected(size_t layer, uint32_t token) const {
    return {rows_.data() + (layer * most_tokens_ + token) * shape_.top_k, shape_.top_k};
  }
  // Probabilities of all experts for one token: shape().experts numbers, finite and >= 0.
  std::span<const float> gates(size_t layer, uint32_t token) const {
    return {gate_rows_.data() + (layer * most_tokens_ + token) * shape_.experts, shape_.experts};
  }

 private:
  // The row of the shape for the layer of a tensor called `prefix`<layer>, or -1.
  int32_t row_of(const ggml_tensor& tensor, std::string_view prefix) const;
  void take_gates(const ggml_tensor& tensor, size_t layer);
  void take(const ggml_tensor& tensor, size_t layer);

  expert::ExpertShape shape_;
  uint32_t most_tokens_;
  uint32_t tokens_ = 0;
  bool damaged_ = false;
  bool wants_gates_ = false, gates_damaged_ = false;
  std::vector<int32_t> layer_rows_;   // model layer -> row of the shape, or -1
  std::vector<uint32_t> seen_;        // tokens taken, per layer
  std::vector<uint16_t> rows_;        // [layer][token][k]
  std::vector<int32_t> row_;          // one row as llama.cpp has it
  std::vector<uint32_t> gates_seen_;  // as seen_
  std::vector<float> gate_rows_;      // [layer][token][expert], allocated when first asked for
};

}  // namespace kindred::engine
