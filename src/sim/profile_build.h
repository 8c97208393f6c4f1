// Making profiles from measured kernels: which rows count for which model and GPU, and what is scaled or assumed
// where nobody measured.
//
// Thread-safety: pure functions.
#pragma once

#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "sim/kernel_data.h"
#include "sim/kernel_fit.h"
#include "sim/profile.h"

namespace kindred::sim {

struct BuiltProfile {
  Profile profile;
  MoeFit moe;
  AttentionFit attention;  // of the H200, which others are scaled from; no rows where there are none for the model
  AllToAllFit all_to_all;  // of the H200
};

struct BuiltProfiles {
  std::vector<BuiltProfile> profiles;
  GemmFit gemm;  // of the H200
};

// Every model on every GPU: H100, H200, B200 by Qwen3-30B-A3B, Qwen3-235B-A22B, GPT-OSS-120B, GPT-OSS-20B,
// DeepSeek-V3. Takes seconds; `progress(done, of)` follows it. Error: kInvalid: rows are missing.
Result<BuiltProfiles> build_profiles(const KernelData& data, const std::function<void(size_t, size_t)>& progress);

}  // namespace kindred::sim
