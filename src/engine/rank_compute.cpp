#include "engine/rank_compute.h"

#include <fmt/format.h>
#include <ggml-backend-impl.h>
#include <ggml-cpu.h>
#include <ggml-impl.h>

#include <algorithm>
#include <cstring>

#include "engine/rank_claims.h"
#include "engine/rank_device.h"

namespace kindred::engine {
namespace {

int32_t expert_at(const ggml_tensor& ids, int64_t slot, int64_t token) {
  int32_t expert = 0;
  const auto* at = static_cast<const std::byte*>(ids.data) + static_cast<size_t>(token) * ids.nb[1] +
                   static_cast<size_t>(slot) * ids.nb[0];
  std::memcpy(&expert, at, sizeof expert);
  return expert;
}

bool contains(const RankGroup& group, const ggml_tensor* tensor) {
  return tensor != nullptr && std::ranges::find(group.nodes, tensor) != group.nodes.end();
}

// How often the group's nodes read `tensor`.
int32_t uses_inside(const RankGroup& group, const ggml_tensor* tensor) {
  int32_t uses = 0;
  for (const ggml_tensor* node : group.nodes) uses += static_cast<int32_t>(std::ranges::count(node->src, tensor));
  return uses;
}

// Backwards, so that a view that is read outside makes its source one that is.
void find_written(const ggml_cgraph& graph, const std::vector<int>& at, RankGroup& group) {
  group.written.assign(group.nodes.size(), false);
  for (size_t i = group.nodes.size(); i-- > 0;) {
    const ggml_tensor* node = group.nodes[i];
    const int32_t uses = ggml_node_get_use_count(&graph, at[i]);
    const bool asked_for = uses == 0 || (node->flags & GGML_TENSOR_FLAG_OUTPUT) != 0;
    if (asked_for || uses > uses_inside(group, node)) group.written[i] = true;
    if (node->op != GGML_OP_VIEW || !group.written[i]) continue;
    const auto source = std::ranges::find(group.nodes, node->src[0]);
    group.written[static_cast<size_t>(source - group.nodes.begin())] = true;
  }
}

}  // namespace

RankCompute::~RankCompute() {
  if (source_ != nullptr) ranks_->counts().close(source_);
}

void RankCompute::set_threads(uint32_t threads) {
  if (threads != threads_) pool_.reset();
  threads_ = threads;
}

Status RankCompute::find_ranks(const ggml_cgraph& graph) {
  for (int i = 0; ranks_ == nullptr && i < graph.n_nodes; ++i) {
    const ggml_tensor* node = graph.nodes[i];
    if (node->op == GGML_OP_MUL_MAT_ID && rank_weights(*node->src[0]) != nullptr) {
      ranks_ = &ranks_of(node->src[0]->buffer->buft);
    }
  }
  if (ranks_ == nullptr || source_ != nullptr) return {};
  source_ = ranks_->counts().open();
  if (source_ != nullptr) return {};
  return Error{ErrorCode::kExhausted,
               fmt::format("more than {} contexts over one model's expert ranks", RankCounts::kMostSources)};
}

Status RankCompute::compute_as_is(ggml_cgraph& graph) {
  if (!pool_) pool_ = make_compute_pool(threads_);
  ggml_cplan plan = ggml_graph_plan(&graph, static_cast<int>(threads_), pool_.get());
  if (work_.size() < plan.work_size) work_.resize(plan.work_size);
  plan.work_data = work_.data();
  if (ggml_graph_compute(&graph, &plan) == GGML_STATUS_SUCCESS) return {};
  return Error{ErrorCode::kInternal, "ggml could not compute the experts"};
}

void RankCompute::count(const ggml_tensor& ids, uint32_t layer, const ExpertOwners::Reading* owners) {
  if (ids.ne[1] == 0 || !ranks_->options().count) return;
  active_.assign(ranks_->shape().experts, false);
  rank_active_.assign(ranks_->ranks(), 0);
  uint32_t active = 0;
  for (int64_t t = 0; t < ids.ne[1]; ++t) {
    for (int64_t k = 0; k < ids.ne[0]; ++k) {
      const auto expert = static_cast<uint32_t>(expert_at(ids, k, t));
      if (expert >= ranks_->shape().experts) continue;  // ggml will say so
      source_->add_token(layer, expert);
      if (active_[expert]) continue;
      active_[expert] = true;
      ++active;
      ++rank_active_[owners == nullptr ? 0 : owners->owner(expert)];
    }
  }
  source_->add_dispatch(layer, active);
  for (uint32_t r = 0; r < ranks_->ranks(); ++r) source_->add_rank_active(r, rank_active_[r]);
}

Status RankCompute::run(const RankGroup& group) {
  if (ggml_nelements(group.ids) == 0) return {};  // no token of the last layer is asked for
  if (!job_) job_ = std::make_shared<RankFfnJob>(*ranks_);
  const ExpertOwners::Reading owners(ranks_->owners(group.layer));
  if (Status ready = job_->prepare(group, owners); !ready) return ready;
  if (group.has_down) {
    count(*group.ids, group.layer, &owners);
    size_t busiest = 0;
    for (uint32_t r = 0; r < ranks_->ranks(); ++r) {
      source_->add_rank_tokens(group.layer, r, job_->pairs(r));
      busiest = std::max(busiest, job_->pairs(r));
    }
    source_->add_busiest(busiest);
  }
  Status done = ranks_->threads().run(job_);
  if (!done.ok()) job_.reset();  // a rank may still be at it
  return done;
}

Status RankCompute::compute(ggml_cgraph& graph) {
  if (Status found = find_ranks(graph); !found) return found;
  RankGroup group;
  std::vector<int> at;  // of the group's nodes in the graph
  const auto flush = [&]() -> Status {
    if (group.nodes.empty()) return {};
    find_written(graph, at, group);
    Status done = run(group);
    group = {};
    at.clear();
    return done;
  };
  const bool one = ranks_ == nullptr || ranks_->ranks() == 1;
  for (int i = 0; i < graph.n_nodes; ++i) {
    ggml_tensor* node = graph.nodes[i];
    const ExpertRanks::Weights* weights = node->op == GGML_OP_MUL_MAT_ID ? rank_weights(*node->src[0]) : nullptr;
    if (one) {
      if (weights == nullptr || !weights->down) continue;
      count(*node->src[2], weights->layer, nullptr);
      const auto tokens = static_cast<uint64_t>(ggml_nelements(node->src[2]));
      source_->add_rank_tokens(weights->layer, 0, tokens);
      source_->add_busiest(tokens);
      continue;
    }
    const bool layout = is_layout_only(*node);
    if (layout && !(is_column_view(*node) && contains(group, node->src[0]))) continue;
    const bool other_layer = weights != nullptr && (group.ids != node->src[2] || group.layer != weights->layer);
    if (other_layer) {
      if (Status done = flush(); !done) return done;
      group.ids = node->src[2];
      group.layer = weights->layer;
    }
    if (group.ids == nullptr) {  // cut off from its products: all it reads is in the CPU's memory
      ggml_cgraph alone = ggml_graph_view(&graph, i, i + 1);
      if (Status done = compute_as_is(alone); !done) return done;
      continue;
    }
    group.nodes.push_back(node);
    group.has_down = group.has_down || (weights != nullptr && weights->down);
    at.push_back(i);
  }
  return one ? compute_as_is(graph) : flush();
}

}  // namespace kindred::engine
