#include "engine/rank_job.h"

#include <fmt/format.h>
#include <ggml-cpu.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "engine/rank_claims.h"

namespace kindred::engine {
namespace {

constexpr size_t kAlignment = 64;

size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

struct FreeRankContext {
  void operator()(ggml_context* context) const { ggml_free(context); }
};

}  // namespace

RankFfnJob::RankFfnJob(ExpertRanks& ranks) : ranks_(ranks), slots_(ranks.ranks()) {}

RankFfnJob::~RankFfnJob() = default;

// Copies [tokens][rows][columns], whatever the strides.
size_t RankFfnJob::take_input(const ggml_tensor& tensor) {
  const auto known = std::ranges::find(input_tensors_, &tensor);
  const auto index = static_cast<size_t>(known - input_tensors_.begin());
  if (known != input_tensors_.end()) return index;
  input_tensors_.push_back(&tensor);
  if (inputs_.size() < input_tensors_.size()) inputs_.emplace_back();  // memory of earlier jobs is kept
  Input& input = inputs_[index];
  input.columns = tensor.ne[0];
  input.row_bytes = static_cast<int64_t>(ggml_row_size(tensor.type, tensor.ne[0]));
  input.rows = tensor.ne[1];
  const auto row_bytes = static_cast<size_t>(input.row_bytes);
  input.data.resize(row_bytes * static_cast<size_t>(input.rows * tensor.ne[2]));
  std::byte* to = input.data.data();
  for (int64_t t = 0; t < tensor.ne[2]; ++t) {
    for (int64_t r = 0; r < input.rows; ++r, to += row_bytes) {
      const auto* from = static_cast<const std::byte*>(tensor.data) + static_cast<size_t>(t) * tensor.nb[2] +
                         static_cast<size_t>(r) * tensor.nb[1];
      std::memcpy(to, from, row_bytes);
    }
  }
  return index;
}

RankFfnJob::Source RankFfnJob::source_of(const RankGroup& group, const ggml_tensor& node, size_t index) {
  const ggml_tensor* tensor = node.src[index];
  if (tensor == nullptr) return {};
  const bool by_expert = node.op == GGML_OP_MUL_MAT_ID || node.op == GGML_OP_ADD_ID;
  if (by_expert && index == 2) return {Source::Kind::kIds, 0};
  if (rank_weights(*tensor) != nullptr) {
    weights_.push_back(*tensor);
    return {Source::Kind::kWeights, weights_.size() - 1};
  }
  if (node.op == GGML_OP_ADD_ID && index == 1) {  // a bias [n, experts], in memory that stays
    constants_.push_back(*tensor);
    return {Source::Kind::kConstant, constants_.size() - 1};
  }
  const auto inside = std::ranges::find(group.nodes, tensor);
  if (inside != group.nodes.end()) {
    return {Source::Kind::kOperation, static_cast<size_t>(inside - group.nodes.begin())};
  }
  return {Source::Kind::kInput, take_input(*tensor)};
}

Status RankFfnJob::prepare(const RankGroup& group, const ExpertOwners::Reading& owners) {
  for (Slot& slot : slots_) {
    slot.pairs.clear();
    slot.experts.clear();
  }
  const ggml_tensor& ids = *group.ids;
  tokens_ = ids.ne[1];
  for (int64_t t = 0; t < tokens_; ++t) {
    for (int64_t k = 0; k < ids.ne[0]; ++k) {
      int32_t expert = 0;
      const auto* at = static_cast<const std::byte*>(ids.data) + static_cast<size_t>(t) * ids.nb[1] +
                       static_cast<size_t>(k) * ids.nb[0];
      std::memcpy(&expert, at, sizeof expert);
      if (expert < 0 || static_cast<uint32_t>(expert) >= ranks_.shape().experts) {
        return Error{ErrorCode::kInternal, fmt::format("expert {} of {}", expert, ranks_.shape().experts)};
      }
      Slot& slot = slots_[owners.owner(static_cast<uint32_t>(expert))];
      slot.pairs.push_back({static_cast<uint32_t>(k), static_cast<uint32_t>(t)});
      slot.experts.push_back(expert);
    }
  }
  operations_.clear();
  input_tensors_.clear();
  constants_.clear();
  weights_.clear();
  for (size_t i = 0; i < group.nodes.size(); ++i) {
    Operation operation{*group.nodes[i], {}, group.written[i]};
    for (size_t s = 0; s < GGML_MAX_SRC; ++s) operation.sources[s] = source_of(group, *group.nodes[i], s);
    if (operation.like.op == GGML_OP_VIEW) operation.like.view_offs -= group.nodes[i]->src[0]->view_offs;
    operations_.push_back(operation);
  }
  return {};
}

size_t RankFfnJob::bytes_needed(size_t pairs) const {
  size_t bytes = aligned(pairs * sizeof(int32_t)) + kAlignment;
  for (size_t i = 0; i < input_tensors_.size(); ++i)
    bytes += aligned(static_cast<size_t>(inputs_[i].row_bytes) * pairs);
  for (const Operation& operation : operations_) {
    if (operation.like.op != GGML_OP_VIEW) {
      bytes += aligned(static_cast<size_t>(operation.like.ne[0]) * sizeof(float) * pairs);
    }
  }
  return bytes;
}

namespace {

// The next bytes of a rank's memory.
void* next_bytes(std::vector<std::byte>& data, size_t& used, size_t bytes) {
  const auto base = reinterpret_cast<uintptr_t>(data.data());
  void* at = data.data() + (aligned(base + used) - base);
  used = aligned(base + used) - base + bytes;
  return at;
}

}  // namespace

ggml_tensor* RankFfnJob::gather(ggml_context* context, Slot& slot, const Input& input) {
  const auto pairs = static_cast<int64_t>(slot.pairs.size());
  const auto row_bytes = static_cast<size_t>(input.row_bytes);
  ggml_tensor* out = ggml_new_tensor_3d(context, GGML_TYPE_F32, input.columns, 1, pairs);
  out->data = next_bytes(slot.data, slot.used, row_bytes * slot.pairs.size());
  auto* to = static_cast<std::byte*>(out->data);
  for (const Pair& pair : slot.pairs) {
    const auto rows = static_cast<size_t>(input.rows);  // 1 or k, as in ggml's MUL_MAT_ID
    const size_t row = pair.token * rows + pair.slot % rows;
    std::memcpy(to, input.data.data() + row * row_bytes, row_bytes);
    to += row_bytes;
  }
  return out;
}

ggml_tensor* RankFfnJob::build(ggml_context* context, Slot& slot, uint32_t rank, const Operation& operation) {
  const auto pairs = static_cast<int64_t>(slot.pairs.size());
  const ggml_tensor& like = operation.like;
  if (like.op == GGML_OP_VIEW) {
    ggml_tensor* source = slot.results[operation.sources[0].index];
    return ggml_view_3d(context, source, like.ne[0], 1, pairs, source->nb[1], source->nb[2], like.view_offs);
  }
  ggml_tensor* out = ggml_new_tensor_3d(context, GGML_TYPE_F32, like.ne[0], 1, pairs);
  out->op = like.op;
  std::memcpy(out->op_params, like.op_params, sizeof out->op_params);
  for (size_t s = 0; s < GGML_MAX_SRC; ++s) {
    const Source& source = operation.sources[s];
    switch (source.kind) {
      case Source::Kind::kNone: break;
      case Source::Kind::kOperation: out->src[s] = slot.results[source.index]; break;
      case Source::Kind::kInput: out->src[s] = slot.inputs[source.index]; break;
      case Source::Kind::kIds: out->src[s] = slot.ids; break;
      case Source::Kind::kConstant: {
        const ggml_tensor& constant = constants_[source.index];
        out->src[s] = ggml_new_tensor(context, constant.type, GGML_MAX_DIMS, constant.ne);
        out->src[s]->data = constant.data;
        break;
      }
      case Source::Kind::kWeights: {
        const ggml_tensor& weights = weights_[source.index];
        out->src[s] = ggml_new_tensor(context, weights.type, GGML_MAX_DIMS, weights.ne);
        out->src[s]->data = rank_weights(weights)->at(rank);
        break;
      }
    }
  }
  out->data = next_bytes(slot.data, slot.used, static_cast<size_t>(like.ne[0]) * sizeof(float) * slot.pairs.size());
  return out;
}

bool RankFfnJob::compute(uint32_t rank) {
  Slot& slot = slots_[rank];
  const size_t tensors = operations_.size() * 3 + input_tensors_.size() + 1;
  const size_t meta = ggml_tensor_overhead() * tensors + ggml_graph_overhead_custom(2 * tensors, false);
  if (slot.meta.size() < meta) slot.meta.resize(meta);
  const size_t bytes = bytes_needed(slot.pairs.size());
  if (slot.data.size() < bytes) slot.data.resize(bytes);
  slot.used = 0;
  const std::unique_ptr<ggml_context, FreeRankContext> context(
      ggml_init({.mem_size = slot.meta.size(), .mem_buffer = slot.meta.data(), .no_alloc = true}));
  if (!context) return false;

  slot.ids = ggml_new_tensor_2d(context.get(), GGML_TYPE_I32, 1, static_cast<int64_t>(slot.pairs.size()));
  slot.ids->data = slot.experts.data();
  slot.inputs.clear();
  for (size_t i = 0; i < input_tensors_.size(); ++i) slot.inputs.push_back(gather(context.get(), slot, inputs_[i]));
  slot.results.clear();
  ggml_cgraph* graph = ggml_new_graph_custom(context.get(), 2 * tensors, false);
  for (const Operation& operation : operations_) {
    slot.results.push_back(build(context.get(), slot, rank, operation));
    ggml_build_forward_expand(graph, slot.results.back());
  }
  const auto threads = static_cast<int>(ranks_.threads_per_rank());
  if (!slot.pool) slot.pool = make_compute_pool(ranks_.threads_per_rank());
  ggml_cplan plan = ggml_graph_plan(graph, threads, slot.pool.get());
  if (slot.work.size() < plan.work_size + kAlignment) slot.work.resize(plan.work_size + kAlignment);
  size_t used = 0;
  plan.work_data = static_cast<uint8_t*>(next_bytes(slot.work, used, plan.work_size));
  return ggml_graph_compute(graph, &plan) == GGML_STATUS_SUCCESS;
}

void RankFfnJob::deliver(uint32_t rank) {
  const Slot& slot = slots_[rank];
  for (size_t i = 0; i < operations_.size(); ++i) {
    const ggml_tensor& like = operations_[i].like;
    if (!operations_[i].written || like.op == GGML_OP_VIEW) continue;
    const size_t row_bytes = static_cast<size_t>(like.ne[0]) * sizeof(float);
    const auto* from = static_cast<const std::byte*>(slot.results[i]->data);
    for (const Pair& pair : slot.pairs) {
      std::memcpy(static_cast<std::byte*>(like.data) + pair.token * like.nb[2] + pair.slot * like.nb[1], from,
                  row_bytes);
      from += row_bytes;
    }
  }
}

}  // namespace kindred::engine
