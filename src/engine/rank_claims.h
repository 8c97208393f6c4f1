// Which operations of llama.cpp's graph the expert ranks compute: products with their experts, and what lies
// between such products. All else stays with the CPU backend.
//
// Thread-safety: pure functions.
#pragma once

#include "engine/expert_ranks.h"

struct ggml_tensor;

namespace kindred::engine {

// The tensor's weights, if it is an expert tensor of some ranks; else null.
const ExpertRanks::Weights* rank_weights(const ggml_tensor& tensor);

// VIEW, RESHAPE, PERMUTE or TRANSPOSE: no work.
bool is_layout_only(const ggml_tensor& tensor);
// A view of the same columns of every row of its source: one half of merged gate and up.
bool is_column_view(const ggml_tensor& tensor);

bool rank_claims(const ggml_tensor& operation);

}  // namespace kindred::engine
