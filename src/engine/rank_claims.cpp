#include "engine/rank_claims.h"

#include <ggml-backend-impl.h>
#include <ggml.h>

#include "engine/rank_device.h"

namespace kindred::engine {
namespace {

// What llama.cpp puts between the products of an FFN: one row, or equal rows of two tensors, give one row.
bool is_rowwise(ggml_op op) {
  switch (op) {
    case GGML_OP_GLU:
    case GGML_OP_UNARY:
    case GGML_OP_CLAMP:
    case GGML_OP_SCALE:
    case GGML_OP_SQR:
    case GGML_OP_MUL:
    case GGML_OP_ADD: return true;
    default: return false;
  }
}

// Of up and gate there are products to come; behind down there is nothing more for the ranks.
enum class Stage { kNone, kInner, kOutput };

constexpr int kMostDepth = 16;  // of an FFN's operations, a bound on the recursion

Stage stage_of(const ggml_tensor& tensor, int depth) {
  if (depth > kMostDepth) return Stage::kNone;
  if (tensor.op == GGML_OP_MUL_MAT_ID) {
    const ExpertRanks::Weights* weights = rank_weights(*tensor.src[0]);
    if (weights == nullptr || tensor.src[1]->type != GGML_TYPE_F32) return Stage::kNone;
    return weights->down ? Stage::kOutput : Stage::kInner;
  }
  if (tensor.op == GGML_OP_ADD_ID) return stage_of(*tensor.src[0], depth + 1);
  if (is_column_view(tensor)) return stage_of(*tensor.src[0], depth + 1);
  if (!is_rowwise(tensor.op) || tensor.type != GGML_TYPE_F32) return Stage::kNone;
  for (const ggml_tensor* source : tensor.src) {
    if (source == nullptr) continue;
    const bool same_rows = source->ne[1] == tensor.ne[1] && source->ne[2] == tensor.ne[2];
    if (!same_rows || stage_of(*source, depth + 1) != Stage::kInner) return Stage::kNone;
  }
  return tensor.src[0] != nullptr ? Stage::kInner : Stage::kNone;
}

}  // namespace

const ExpertRanks::Weights* rank_weights(const ggml_tensor& tensor) {
  if (tensor.buffer == nullptr || !is_rank_buffer_type(tensor.buffer->buft)) return nullptr;
  return static_cast<const ExpertRanks::Weights*>(tensor.extra);
}

bool is_layout_only(const ggml_tensor& tensor) {
  return tensor.op == GGML_OP_NONE || tensor.op == GGML_OP_VIEW || tensor.op == GGML_OP_RESHAPE ||
         tensor.op == GGML_OP_PERMUTE || tensor.op == GGML_OP_TRANSPOSE;
}

bool is_column_view(const ggml_tensor& tensor) {
  if (tensor.op != GGML_OP_VIEW) return false;
  const ggml_tensor& source = *tensor.src[0];
  return tensor.ne[1] == source.ne[1] && tensor.ne[2] == source.ne[2] && tensor.ne[3] == source.ne[3] &&
         tensor.nb[0] == source.nb[0] && tensor.nb[1] == source.nb[1] && tensor.nb[2] == source.nb[2] &&
         tensor.view_offs >= source.view_offs &&
         tensor.view_offs - source.view_offs + static_cast<size_t>(tensor.ne[0]) * tensor.nb[0] <= source.nb[1];
}

bool rank_claims(const ggml_tensor& operation) {
  if (is_layout_only(operation)) {
    const ggml_tensor* root = operation.view_src != nullptr ? operation.view_src : &operation;
    return root->buffer != nullptr && is_rank_buffer_type(root->buffer->buft);
  }
  return stage_of(operation, 0) != Stage::kNone;
}

}  // namespace kindred::engine
