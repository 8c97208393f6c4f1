// How long a worker's step takes (design.md §5 and §6): a hardware profile applied to what is in the step.
//
// Thread-safety: const after construction; any thread.
#pragma once

#include <cstdint>
#include <span>

#include "sim/profile.h"

namespace kindred::sim {

// One forward pass of one engine. A step may mix chunks of prefill and decode tokens. With expert parallelism each
// rank is an engine with requests of its own, and all engines of the group step together: the time of the group is
// the longest of its engines'.
struct StepShape {
  uint32_t prefill_tokens = 0;        // computed in this step
  double prefill_token_contexts = 0;  // sum, over those tokens, of the context each attends to
  uint32_t decode_requests = 0;       // one token each
  double decode_context_tokens = 0;   // sum of their contexts: KV read
  // [MoE layers]: distinct experts that the rank with the most of them has to read. Fewer layers than the model has
  // stand for all. Empty: what is expected of tokens that choose their experts evenly.
  std::span<const uint32_t> experts = {};
  uint32_t ranks = 1;         // of expert parallelism
  uint32_t group_tokens = 0;  // prefill and decode tokens of all engines of the group; 0: as many on each rank
  // The share of a token's top_k copies that goes to another rank; below 0: (ranks - 1) / ranks, as without regard
  // to placement.
  double remote_share = -1;
  // Where each rank's work is known (sim/rank_flow.h), in place of `experts`, `group_tokens` and `remote_share` for
  // experts and their exchange: [layers, ranks] copies of the group's tokens and distinct experts, and [layers] the
  // copies that the busiest link carries. All three, or none.
  std::span<const float> rank_copies = {};
  std::span<const uint32_t> rank_experts = {};
  std::span<const float> link_copies = {};
};

class StepTime {
 public:
  // profile.check() must hold.
  explicit StepTime(Profile profile);

  const Profile& profile() const { return profile_; }
  double seconds(const StepShape& step) const;

  // Of which: for reports. Microseconds.
  struct Parts {
    double moe_us = 0, attention_us = 0, projections_us = 0, head_us = 0, all_to_all_us = 0, host_us = 0;
    double total_us() const { return moe_us + attention_us + projections_us + head_us + all_to_all_us + host_us; }
  };
  Parts parts(const StepShape& step) const;

  // One MoE layer on one rank: `tokens` of the group, `distinct` experts.
  double moe_layer_us(double tokens, double distinct, uint32_t ranks) const;

  double kv_bytes_per_token() const { return profile_.memory.kv_bytes_per_token; }
  // Moving `tokens` of KV over that share of the sender's link, in (0, 1].
  double kv_transfer_s(uint64_t tokens, double bandwidth_share) const;

 private:
  double moe_layers_us(std::span<const uint32_t> experts, double group_tokens, uint32_t ranks) const;
  double moe_ranks_us(const StepShape& step) const;
  double all_to_all_us(const StepShape& step, double tokens) const;
  double gemm_us(const Projection& projection, double tokens) const;
  double attention_us(const StepShape& step, double decode) const;
  double padded(uint32_t decode_requests) const;

  Profile profile_;
};

// The law of MoeFigures. `assignments` to the rank's experts, of which there are `experts`; `distinct` > 0 of them
// are used. Skewed: use falls off geometrically from expert to expert, as measured routing does, so that
// experts have distinct / (1 - (1 - distinct / assignments)^rows) tiles; otherwise all experts have as many.
double moe_kernel_us(const MoeFigures& moe, double assignments, double distinct, uint32_t experts, uint32_t top_k,
                     bool skewed = true);

// The same, with block sizes and tiles apart, for fitting.
size_t moe_block(const MoeFigures& moe, double assignments_per_expert);
double moe_tiles(double assignments, double distinct, uint32_t rows, bool skewed);

// Expected distinct experts of `tokens` tokens that choose top_k of E evenly: E (1 - (1 - k / E)^n).
double uniform_union(double experts, double top_k, double tokens);

double gemm_kernel_us(const GemmFigures& gemm, double m, double n, double k, double weight_bytes);

// (x^p + y^p)^(1/p); the larger one from p = kHardMax on.
double soft_max(double x, double y, double p);

}  // namespace kindred::sim
