// Sees which experts llama.cpp selects while it evaluates a batch.
//
// Thread-safety: none; belongs to the engine's thread. Must outlive the llama_context it is given to.
#pragma once

#include <cstdint>
#include <span>
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

  // Before llama_decode of `tokens` tokens.
  void begin(uint32_t tokens);
  // After llama_decode returned 0, never otherwise: an aborted batch leaves rows of tokens that have no
  // KV. False: some layer did not give one row per token, and the rows must not be used.
  bool complete() const;

  const expert::ExpertShape& shape() const { return shape_; }
  // The experts of one token of the batch in row `layer` of the shape.
  std::span<const uint16_t> selected(size_t layer, uint32_t token) const {
    return {rows_.data() + (layer * most_tokens_ + token) * shape_.top_k, shape_.top_k};
  }

 private:
  void take(const ggml_tensor& tensor, size_t layer);

  expert::ExpertShape shape_;
  uint32_t most_tokens_;
  uint32_t tokens_ = 0;
  bool damaged_ = false;
  std::vector<int32_t> layer_rows_;  // model layer -> row of the shape, or -1
  std::vector<uint32_t> seen_;       // tokens taken, per layer
  std::vector<uint16_t> rows_;       // [layer][token][k]
  std::vector<int32_t> row_;         // one row as llama.cpp has it
};

}  // namespace kindred::engine
