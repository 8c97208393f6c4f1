// Fitting the laws of profile.h to measured kernels, and how well they foretell rows that they were not fitted to.
//
// Errors are relative: |predicted / measured - 1|. Everything is deterministic.
//
// Thread-safety: pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "sim/kernel_data.h"
#include "sim/profile.h"

namespace kindred::sim {

struct FitError {
  size_t rows = 0;
  double mean = 0, worst = 0;

  void add(double predicted, double measured);
};

// Which rows of moe_kernels a profile is made from, all of ranks = 1.
struct MoeSelection {
  std::string gpu, framework, version, model, dtype;
  // The distribution fitted to; the others are held out. "balanced" is right unless the model limits a token to
  // some groups of experts: AIConfigurator's balanced tokens choose one expert in each group, so that a model with
  // group-limited routing (DeepSeek-V3) answers them with other experts, and how many is not recorded.
  std::string fit_to = "balanced";
  // Quantised kernels that unpack weights tile by tile take the same time for an expert's second tile as for its
  // first: cost per tile and block size comes straight from the plateaus of the balanced rows. Otherwise tiles cost
  // arithmetic only, overlapped with fetching.
  bool tiled = false;
  uint32_t least_rows = 16;  // of a block: 16 in Triton (tl.dot), 8 in TensorRT-LLM's generated kernels
  // Tried for MoeFigures::block_factor, that which fits best is taken.
  std::vector<double> block_factors = {0.5, 1, 2, 4};
};

struct MoeFit {
  MoeFigures figures;
  std::string kernel;                 // as the rows name it
  double a_us = 0, b_us = 0, r2 = 0;  // ELDR's line through the rows whose tokens * top_k do not exceed E
  FitError fitted;                    // all rows that it was fitted to
  FitError held_out;                  // all other rows
  FitError held_out_decode;           // of those, up to kDecodeTokens tokens
};
inline constexpr uint32_t kDecodeTokens = 128;

// Error: kInvalid: no rows, or too few; the message says which.
Result<MoeFit> fit_moe(std::span<const MoeRow> rows, const MoeSelection& selection);

// The mean over simulated draws of the number of distinct experts in AIConfigurator's power-law rows: tokens per
// expert are x^-alpha distributed, on [1, 0.8 tokens] if there are more assignments than experts and on [0.01, 2]
// otherwise, scaled to the sum and rounded; what rounding leaves over goes to the experts with the fewest, what it
// adds is taken from those with the most.
double power_law_union(uint32_t tokens, uint32_t experts, uint32_t top_k, double alpha);

struct AttentionFit {
  AttentionLaw law;
  FitError fitted, held_out;  // every second row is held out
};
// Rows of that shape. Error: kInvalid: fewer than 8.
Result<AttentionFit> fit_attention(std::span<const AttentionRow> rows, uint32_t heads, uint32_t kv_heads,
                                   uint32_t head_dim, uint32_t window);

struct GemmFit {
  GemmFigures figures;
  FitError fitted, held_out;  // the middle one of the values of k is held out
};
// Error: kInvalid: fewer than 16 rows.
Result<GemmFit> fit_gemm(std::span<const GemmRow> rows);

struct AllToAllFit {
  AllToAllFigures figures;
  uint32_t hidden = 0;        // that the rows are of: the nearest to what was asked for
  FitError fitted, held_out;  // every second row is held out
};
// Error: kInvalid: fewer than 8 rows of such a top_k.
Result<AllToAllFit> fit_all_to_all(std::span<const AllToAllRow> rows, uint32_t hidden, uint32_t top_k);

}  // namespace kindred::sim
