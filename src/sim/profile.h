// Hardware profiles: what each part of a forward pass takes, for one GPU, model and kernel. docs/simulator.md
// describes the file (JSON); profiles/ holds those that ship, made by `kindred simulate profile`.
//
// Units are in the names: microseconds, bytes, tokens. Figures are of one GPU. Every section says where its
// figures come from, and whether they are measured, scaled from another GPU, or assumed.
//
// Thread-safety: plain values.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "expert/counts.h"

namespace kindred::sim {

struct ModelDims {
  uint32_t layers = 0;
  uint32_t moe_layers = 0;  // of them; the others have a dense feed-forward block
  uint32_t hidden = 0;
  uint32_t experts = 0;  // E, routed, a layer
  uint32_t top_k = 0;
  uint32_t heads = 0, kv_heads = 0, head_dim = 0;
  uint32_t vocab = 0;
  uint32_t window_layers = 0;  // of `layers`: attend to the last window_tokens only
  uint32_t window_tokens = 0;
};

// The expert computation of one MoE layer on one rank. With A = tokens * top_k / ranks assignments to the
// rank's experts, of which |U| are distinct, kernels work in tiles of `rows` assignments of one expert:
//   time = a + ((b |U|)^p + (tile * tiles)^p)^(1/p) + token * A / top_k
// b |U| is fetching weights (ELDR's law), the tiles are arithmetic, p says how well the two overlap: 1 not at
// all, from kHardMax on perfectly. `rows` is the smallest block size that is at least block_factor times the mean
// assignments per expert of the rank, the largest block size if none is.
struct MoeBlock {
  uint32_t rows = 0;
  double tile_us = 0;
};
struct MoeFigures {
  double a_us = 0, b_us = 0, token_us = 0;
  double power = 1;                   // p
  double block_factor = 1;            //
  std::vector<MoeBlock> blocks = {};  // ascending rows, at least one
  std::string source = {};
};
inline constexpr double kHardMax = 32;

// launch + requests * request + cached tokens * token.
struct AttentionLaw {
  double launch_us = 0, request_us = 0, token_us = 0;
};
struct AttentionFigures {
  AttentionLaw decode = {}, decode_window = {};  // a layer; the latter for layers with a window
  double prefill_us_per_context = 0;             // a layer, per prompt token and token that it attends to
  std::string source = {};
};

// A dense matrix product, m tokens x n x k: launch + (memory^p + arithmetic^p)^(1/p), with
//   memory = (n k weight_bytes + 2 (m k + m n)) / bytes_per_us,
//   arithmetic = 2 (m + edge) (n + edge) k weight_bytes / 2 / flops_per_us
// (8-bit weights multiply at twice the rate of 16-bit ones).
struct GemmFigures {
  double launch_us = 0, bytes_per_us = 0, flops_per_us = 0, power = 1, edge = 0;
  std::string source = {};
};
struct Projection {
  std::string name = {};
  uint32_t n = 0, k = 0;
  double count = 0;  // a forward pass
  double weight_bytes = 2;
};

// DeepEP's low-latency kernels: launch + max(0, bytes that the rank sends) / bytes_per_us, twice a layer.
struct AllToAllFigures {
  double dispatch_us = 0, dispatch_bytes_per_us = 0;  // 8 bits a value
  double combine_us = 0, combine_bytes_per_us = 0;    // 16 bits a value
  uint32_t ranks = 0;                                 // measured with so many; 0: the profile has no such kernel
  std::string source = {};
};

struct MemoryFigures {
  double hbm_bytes = 0;
  double usable_share = 0.9;       // of HBM, for weights and KV
  double dense_weight_bytes = 0;   // on every rank
  double expert_weight_bytes = 0;  // all experts of all layers
  double kv_bytes_per_token = 0;   // all layers
  std::string source = {};
};

struct LinkFigures {
  double bytes_per_us = 0, latency_us = 0;  // of KV transfer out of one worker
  std::string source = {};
};

struct HostFigures {
  double step_us = 0;   // a step, not hidden behind the GPU
  double layer_us = 0;  // a layer: norms, rotary embedding, residuals, gate, each a small kernel
  std::string source = {};
};

struct Profile {
  std::string name, gpu, model, dtype, kernel;
  ModelDims dims;
  MoeFigures moe;
  AttentionFigures attention;
  GemmFigures gemm;
  std::vector<Projection> projections;  // the head, called "head", counts only tokens that are sampled
  AllToAllFigures all_to_all;
  MemoryFigures memory;
  LinkFigures kv_link;
  HostFigures host;
  std::vector<uint32_t> graph_sizes;  // ascending batch sizes that decode is padded to; empty: not padded

  // Error: kInvalid, naming the field and what is accepted.
  Status check() const;
  // Whether a worker of so many ranks can run the model: experts divide, kernels are there, weights fit.
  Status check_ranks(uint32_t ranks) const;
  // Whether experts of that shape are this model's. Fewer layers are fine: they stand for all.
  Status check_experts(const expert::ExpertShape& shape) const;
  // Tokens of KV that all ranks together hold beside the weights; 0: the weights do not fit.
  uint64_t kv_capacity_tokens(uint32_t ranks) const;
};

// Error: kInvalid, naming the field; unknown fields are errors, too.
Result<Profile> parse_profile(std::string_view json);
Result<Profile> load_profile(const std::string& path);  // also kIo, kNotFound; the message begins with the path
std::string profile_json(const Profile& profile);
Status save_profile(const Profile& profile, const std::string& path);

}  // namespace kindred::sim
