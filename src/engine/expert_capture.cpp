#include "engine/expert_capture.h"

#include <ggml-backend.h>
#include <ggml.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <string_view>

namespace kindred::engine {
namespace {

// llama.cpp names the tensors of layer 3 "ffn_moe_topk-3" and "ffn_moe_probs-3".
constexpr std::string_view kTopK = "ffn_moe_topk-";
constexpr std::string_view kProbabilities = "ffn_moe_probs-";

int32_t layer_of(std::string_view name, std::string_view prefix) {
  if (!name.starts_with(prefix)) return -1;
  name.remove_prefix(prefix.size());
  int32_t layer = -1;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), layer);
  return error == std::errc() && end == name.data() + name.size() ? layer : -1;
}

}  // namespace

ExpertCapture::ExpertCapture(expert::ExpertShape shape, uint32_t most_tokens)
    : shape_(std::move(shape)),
      most_tokens_(most_tokens),
      seen_(shape_.layers.size(), 0),
      rows_(shape_.layers.size() * most_tokens * shape_.top_k, 0),
      row_(shape_.top_k, 0) {
  for (size_t row = 0; row < shape_.layers.size(); ++row) {
    if (shape_.layers[row] >= layer_rows_.size()) layer_rows_.resize(shape_.layers[row] + 1, -1);
    layer_rows_[shape_.layers[row]] = static_cast<int32_t>(row);
  }
}

int32_t ExpertCapture::row_of(const ggml_tensor& tensor, std::string_view prefix) const {
  const int32_t layer = layer_of(tensor.name, prefix);
  return layer < 0 || static_cast<size_t>(layer) >= layer_rows_.size() ? -1 : layer_rows_[static_cast<size_t>(layer)];
}

bool ExpertCapture::on_tensor(ggml_tensor* tensor, bool ask, void* self) {
  auto& capture = *static_cast<ExpertCapture*>(self);
  // asked: whether to show it; shown: go on
  if (const int32_t row = capture.row_of(*tensor, kTopK); row >= 0) {
    if (!ask) capture.take(*tensor, static_cast<size_t>(row));
    return true;
  }
  if (!capture.wants_gates_) return !ask;
  const int32_t row = capture.row_of(*tensor, kProbabilities);
  if (row < 0) return !ask;
  if (!ask) capture.take_gates(*tensor, static_cast<size_t>(row));
  return true;
}

void ExpertCapture::begin(uint32_t tokens, bool gates) {
  tokens_ = tokens;
  damaged_ = tokens > most_tokens_;
  std::fill(seen_.begin(), seen_.end(), 0);
  wants_gates_ = gates;
  gates_damaged_ = damaged_;
  if (!gates) return;
  gates_seen_.assign(shape_.layers.size(), 0);
  gate_rows_.resize(shape_.layers.size() * most_tokens_ * shape_.experts);
}

bool ExpertCapture::complete() const {
  return !damaged_ && std::all_of(seen_.begin(), seen_.end(), [this](uint32_t seen) { return seen == tokens_; });
}

bool ExpertCapture::gates_complete() const {
  return wants_gates_ && !gates_damaged_ &&
         std::all_of(gates_seen_.begin(), gates_seen_.end(), [this](uint32_t seen) { return seen == tokens_; });
}

void ExpertCapture::take_gates(const ggml_tensor& tensor, size_t layer) {
  const int64_t tokens = tensor.ne[1];
  if (tensor.type != GGML_TYPE_F32 || tensor.ne[0] != shape_.experts || tensor.ne[2] != 1 ||
      tokens + gates_seen_[layer] > most_tokens_) {
    gates_damaged_ = true;
    return;
  }
  const size_t row_bytes = shape_.experts * sizeof(float);
  const ggml_backend_buffer_t buffer = tensor.view_src != nullptr ? tensor.view_src->buffer : tensor.buffer;
  const bool host = buffer == nullptr || ggml_backend_buffer_is_host(buffer);
  float* to = gate_rows_.data() + (layer * most_tokens_ + gates_seen_[layer]) * shape_.experts;
  for (int64_t t = 0; t < tokens; ++t, to += shape_.experts) {
    const size_t offset = static_cast<size_t>(t) * tensor.nb[1];
    if (host) {
      std::memcpy(to, static_cast<const char*>(tensor.data) + offset, row_bytes);
    } else {
      ggml_backend_tensor_get(&tensor, to, offset, row_bytes);
    }
    if (std::any_of(to, to + shape_.experts, [](float p) { return !std::isfinite(p) || p < 0; })) gates_damaged_ = true;
  }
  gates_seen_[layer] += static_cast<uint32_t>(tokens);
}

void ExpertCapture::take(const ggml_tensor& tensor, size_t layer) {
  // The tensor is a view on the first k columns of an argsort: its rows are n_expert apart.
  const int64_t tokens = tensor.ne[1];
  if (tensor.type != GGML_TYPE_I32 || tensor.ne[0] != shape_.top_k || tokens + seen_[layer] > most_tokens_) {
    damaged_ = true;
    return;
  }
  const size_t row_bytes = row_.size() * sizeof(int32_t);
  const ggml_backend_buffer_t buffer = tensor.view_src != nullptr ? tensor.view_src->buffer : tensor.buffer;
  const bool host = buffer == nullptr || ggml_backend_buffer_is_host(buffer);
  uint16_t* to = rows_.data() + (layer * most_tokens_ + seen_[layer]) * shape_.top_k;
  for (int64_t t = 0; t < tokens; ++t) {
    const size_t offset = static_cast<size_t>(t) * tensor.nb[1];
    if (host) {
      std::memcpy(row_.data(), static_cast<const char*>(tensor.data) + offset, row_bytes);
    } else {
      ggml_backend_tensor_get(&tensor, row_.data(), offset, row_bytes);
    }
    for (const int32_t expert : row_) {
      if (expert < 0 || static_cast<uint32_t>(expert) >= shape_.experts) damaged_ = true;
      *to++ = static_cast<uint16_t>(expert);
    }
  }
  seen_[layer] += static_cast<uint32_t>(tokens);
}

}  // namespace kindred::engine
