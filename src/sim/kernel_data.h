// Kernel latencies that others measured, from CSV files: what profiles are fitted to.
//
// Files of a folder, each .csv or .csv.xz (columns in any order, others ignored):
//   moe_kernels                gpu, framework, version, model, top_k, experts, dtype, kernel, ep_size, distribution,
//                              tokens, latency_us
//   h200_decode_attention      batch_size, isl, step, num_heads, num_key_value_heads, head_dim, window_size,
//                              latency_us
//   h200_gemm_bf16             m, n, k, latency_us
//   h200_deepep_low_latency    node_num, hidden_size, num_token, num_topk, num_experts, combine_avg_t_us,
//                              dispatch_avg_t_us
//
// Thread-safety: plain values.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/result.h"

namespace kindred::sim {

struct MoeRow {
  std::string gpu, framework, version, model, dtype, kernel, distribution;
  uint32_t top_k = 0, experts = 0, ranks = 0, tokens = 0;
  double us = 0;
};

struct AttentionRow {
  uint32_t requests = 0, context = 0;  // of each
  uint32_t heads = 0, kv_heads = 0, head_dim = 0, window = 0;
  double us = 0;
};

struct GemmRow {
  uint32_t m = 0, n = 0, k = 0;
  double us = 0;
};

struct AllToAllRow {
  uint32_t hidden = 0, tokens = 0, top_k = 0, experts = 0;
  double dispatch_us = 0, combine_us = 0;
};

struct KernelData {
  std::vector<MoeRow> moe;
  std::vector<AttentionRow> attention;
  std::vector<GemmRow> gemm;
  std::vector<AllToAllRow> all_to_all;  // within a node
};

// Error: kNotFound (names the file that is missing), kIo, kCorrupt, kInvalid (names file, line and column).
Result<KernelData> load_kernels(const std::string& folder);

}  // namespace kindred::sim
