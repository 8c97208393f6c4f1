// What Gimbal's paper says it measured ("Coordinated Scheduling for MoE LLM Serving", 2026, sections 2.2, 6 and 7). Of
// the baseline it prints few absolute figures; gains are shares of another system's figure.
//
// Thread-safety: constants.
#pragma once

#include <array>
#include <string_view>

namespace kindred::reproduce {

// Of vLLM at 4 requests a second; what a calibration may see.
struct GimbalBaseline {
  double running = 87.56;             // requests an engine, mean over five mixes (section 7.4)
  double gap_tokens_per_s = 1485.66;  // of prompts between the two engines, mean over five mixes (7.4)
  double ttft_p99_s = 4.9;            // "below" it, under high load (6)
  // The random mix alone (7.3):
  double random_running = 90.5;
  double random_kv = 0.265;
  double random_gap_tokens_per_s = 1240;
};
inline constexpr GimbalBaseline kGimbalBaseline = {};

// Changes, shares; 0 where the paper prints none.
struct GimbalChange {
  std::string_view what;  // arm of reproduce/gimbal_cluster.h
  std::string_view against;
  double ttft = 0, tpot = 0, e2e = 0, ttft_p99 = 0, throughput = 0;
};
// Means over all mixes, rates and seeds (7.2 to 7.4); throughput at 4 requests a second.
inline constexpr std::array kGimbalChanges = {
    GimbalChange{"gimbal", "vllm", -0.429, -0.333, -0.320, -0.443, 0.0304},
    GimbalChange{"gimbal", "moetuner", -0.470, -0.362, -0.347, -0.486, 0},
    GimbalChange{"gimbal", "sem-moe", -0.347, -0.295, -0.285, -0.338, 0},
    GimbalChange{"gimbal", "uncalibrated", -0.108, -0.092, 0, 0, 0},
};
// The ablation's own run of it (7.4), all against vllm.
inline constexpr std::array kGimbalAblation = {
    GimbalChange{"dp", "vllm", -0.251, -0.134, 0, 0, 0},
    GimbalChange{"ep", "vllm", -0.262, -0.227, 0, 0, 0},
    GimbalChange{"both", "vllm", -0.298, -0.273, 0, 0, 0},
    GimbalChange{"gimbal", "vllm", -0.414, -0.320, 0, 0, 0},
};
// By rate, gimbal against vllm (7.3).
struct GimbalRateChange {
  double rate = 0, ttft = 0, tpot = 0, e2e = 0, throughput = 0;
};
inline constexpr std::array kGimbalByRate = {
    GimbalRateChange{2, -0.331, -0.241, -0.238, 0.0094},
    GimbalRateChange{2.5, 0, 0, 0, 0.0106},
    GimbalRateChange{3, 0, 0, 0, 0.0152},
    GimbalRateChange{3.5, 0, 0, 0, 0.0205},
    GimbalRateChange{4, -0.483, -0.384, -0.369, 0.0304},
};
// Signals at 4 requests a second (7.4; the last three of the random mix, 7.3).
inline constexpr double kGimbalEpRunning = 71.53, kGimbalDpGap = 768.43;
inline constexpr double kGimbalRandomRunning = 57.5, kGimbalRandomKv = 0.17, kGimbalRandomGap = 740;

}  // namespace kindred::reproduce
