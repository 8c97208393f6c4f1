#include "sim/step_time.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

namespace kindred::sim {
namespace {

constexpr double kUsPerS = 1e6;

}  // namespace

double soft_max(double x, double y, double p) {
  const double most = std::max(x, y);
  if (p >= kHardMax || most <= 0) return most;
  return most * std::pow(1 + std::pow(std::min(x, y) / most, p), 1 / p);
}

size_t moe_block(const MoeFigures& moe, double assignments_per_expert) {
  size_t at = 0;
  while (at + 1 < moe.blocks.size() && moe.blocks[at].rows < assignments_per_expert * moe.block_factor) ++at;
  return at;
}

double moe_tiles(double assignments, double distinct, uint32_t rows, bool skewed) {
  const double mean = assignments / distinct;
  if (mean <= 1) return distinct;
  if (!skewed) return distinct * std::ceil(mean / rows - 1e-9);
  return distinct / (1 - std::pow(1 - 1 / mean, rows));
}

double moe_kernel_us(const MoeFigures& moe, double assignments, double distinct, uint32_t experts, uint32_t top_k,
                     bool skewed) {
  const MoeBlock& block = moe.blocks[moe_block(moe, assignments / experts)];
  const double tiles = moe_tiles(assignments, distinct, block.rows, skewed);
  return moe.a_us + soft_max(moe.b_us * distinct, block.tile_us * tiles, moe.power) +
         moe.token_us * assignments / top_k;
}

double uniform_union(double experts, double top_k, double tokens) {
  return experts * (1 - std::pow(1 - top_k / experts, tokens));
}

double gemm_kernel_us(const GemmFigures& gemm, double m, double n, double k, double weight_bytes) {
  const double memory = (n * k * weight_bytes + 2 * (m * k + m * n)) / gemm.bytes_per_us;
  const double arithmetic = (m + gemm.edge) * (n + gemm.edge) * k * weight_bytes / gemm.flops_per_us;
  return gemm.launch_us + soft_max(memory, arithmetic, gemm.power);
}

StepTime::StepTime(Profile profile) : profile_(std::move(profile)) {}

double StepTime::moe_layer_us(double tokens, double distinct, uint32_t ranks) const {
  const ModelDims& dims = profile_.dims;
  // A rank none of whose experts is used still launches its kernels.
  if (distinct <= 0) return profile_.moe.a_us;
  const double assignments = std::max(distinct, tokens * dims.top_k / ranks);
  return moe_kernel_us(profile_.moe, assignments, distinct, dims.experts / ranks, dims.top_k);
}

// Layers of a step have much the same numbers of distinct experts, and powers are dear: each number once.
double StepTime::moe_layers_us(std::span<const uint32_t> experts, double group_tokens, uint32_t ranks) const {
  constexpr size_t kRemembered = 64;
  std::array<std::pair<uint32_t, double>, kRemembered> known;
  size_t count = 0;
  double sum_us = 0;
  for (const uint32_t distinct : experts) {
    size_t at = 0;
    while (at < count && known[at].first != distinct) ++at;
    if (at == count) {
      const double us = moe_layer_us(group_tokens, distinct, ranks);
      if (count == kRemembered) {
        sum_us += us;
        continue;
      }
      known[count++] = {distinct, us};
    }
    sum_us += known[at].second;
  }
  return sum_us;
}

// Each layer waits for its slowest rank.
double StepTime::moe_ranks_us(const StepShape& step) const {
  const ModelDims& dims = profile_.dims;
  double sum_us = 0;
  for (size_t at = 0; at < step.rank_copies.size(); at += step.ranks) {
    double slowest_us = profile_.moe.a_us;
    for (size_t r = at; r < at + step.ranks; ++r) {
      const double distinct = step.rank_experts[r];
      if (distinct <= 0) continue;
      const double copies = std::max<double>(distinct, step.rank_copies[r]);
      slowest_us =
          std::max(slowest_us, moe_kernel_us(profile_.moe, copies, distinct, dims.experts / step.ranks, dims.top_k));
    }
    sum_us += slowest_us;
  }
  return sum_us * dims.moe_layers * step.ranks / static_cast<double>(step.rank_copies.size());
}

double StepTime::all_to_all_us(const StepShape& step, double tokens) const {
  const ModelDims& dims = profile_.dims;
  const AllToAllFigures& figures = profile_.all_to_all;
  // The kernels were measured with copies spread evenly over their ranks, so the bytes there are all copies; what
  // stays on the rank is left out in proportion.
  const double even = figures.ranks > 0 ? (figures.ranks - 1.0) / figures.ranks : 1;
  double copies = 0;  // a layer
  if (step.link_copies.empty()) {
    const double share = step.remote_share < 0 ? (step.ranks - 1.0) / step.ranks : step.remote_share;
    copies = tokens * dims.top_k * share;
  } else {
    for (const float carried : step.link_copies) copies += carried;
    copies /= static_cast<double>(step.link_copies.size());
  }
  const double values = copies * dims.hidden / even;
  return dims.moe_layers * (figures.dispatch_us + values / figures.dispatch_bytes_per_us + figures.combine_us +
                            2 * values / figures.combine_bytes_per_us);
}

double StepTime::gemm_us(const Projection& projection, double tokens) const {
  return projection.count * gemm_kernel_us(profile_.gemm, tokens, projection.n, projection.k, projection.weight_bytes);
}

double StepTime::padded(uint32_t decode_requests) const {
  const auto& sizes = profile_.graph_sizes;
  const auto size = std::lower_bound(sizes.begin(), sizes.end(), decode_requests);
  return size == sizes.end() ? decode_requests : *size;
}

double StepTime::attention_us(const StepShape& step, double decode) const {
  const ModelDims& dims = profile_.dims;
  const AttentionFigures& figures = profile_.attention;
  const double full = dims.layers - dims.window_layers;
  const double windowed = dims.window_layers;
  double us = 0;
  if (step.decode_requests > 0) {
    const double seen =
        std::min(step.decode_context_tokens, static_cast<double>(step.decode_requests) * dims.window_tokens);
    const auto law = [decode](const AttentionLaw& of, double tokens) {
      return of.launch_us + decode * of.request_us + tokens * of.token_us;
    };
    us += full * law(figures.decode, step.decode_context_tokens) + windowed * law(figures.decode_window, seen);
  }
  if (step.prefill_tokens > 0) {
    const double seen =
        std::min(step.prefill_token_contexts, static_cast<double>(step.prefill_tokens) * dims.window_tokens);
    us += dims.layers * figures.decode.launch_us +
          figures.prefill_us_per_context * (full * step.prefill_token_contexts + windowed * seen);
  }
  return us;
}

StepTime::Parts StepTime::parts(const StepShape& step) const {
  const ModelDims& dims = profile_.dims;
  Parts parts;
  const uint32_t own = step.prefill_tokens + step.decode_requests;
  if (own == 0 && step.group_tokens == 0) return parts;
  // Graphs are captured for decode alone.
  const double decode = step.prefill_tokens == 0 ? padded(step.decode_requests) : step.decode_requests;
  const double tokens = step.prefill_tokens + decode;
  const double group = step.group_tokens > 0 ? step.group_tokens : static_cast<double>(own) * step.ranks;

  if (!step.rank_copies.empty()) {
    parts.moe_us = moe_ranks_us(step);
  } else if (step.experts.empty()) {
    const double even = uniform_union(dims.experts, dims.top_k, group) / step.ranks;
    parts.moe_us = dims.moe_layers * moe_layer_us(group, even, step.ranks);
  } else {
    parts.moe_us = moe_layers_us(step.experts, group, step.ranks);
    parts.moe_us *= static_cast<double>(dims.moe_layers) / static_cast<double>(step.experts.size());
  }
  parts.attention_us = attention_us(step, decode);
  for (const Projection& projection : profile_.projections) {
    // The last token of each request is sampled; a chunk of prefill counts as one request.
    const bool head = projection.name == "head";
    if (head) parts.head_us += gemm_us(projection, decode + (step.prefill_tokens > 0 ? 1 : 0));
    else parts.projections_us += gemm_us(projection, tokens);
  }
  if (step.ranks > 1) parts.all_to_all_us = all_to_all_us(step, tokens);
  parts.host_us = profile_.host.step_us + dims.layers * profile_.host.layer_us;
  return parts;
}

double StepTime::seconds(const StepShape& step) const { return parts(step).total_us() / kUsPerS; }

double StepTime::kv_transfer_s(uint64_t tokens, double bandwidth_share) const {
  const LinkFigures& link = profile_.kv_link;
  const double bytes = static_cast<double>(tokens) * profile_.memory.kv_bytes_per_token;
  return (link.latency_us + bytes / (link.bytes_per_us * bandwidth_share)) / kUsPerS;
}

}  // namespace kindred::sim
