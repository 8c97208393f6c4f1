// How a model's experts are spread over ranks (expert_ranks.h).
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace kindred::engine {

enum class RankPinning { kAuto, kAlways, kNever };  // auto: where there is more than one NUMA node

struct ExpertRanksOptions {
  uint32_t ranks = 0;    // 0: off
  uint32_t threads = 0;  // of all ranks together; 0: one per processor
  RankPinning pinning = RankPinning::kAuto;
  std::string placement = {};  // file to begin with; empty: experts in order
  uint32_t moves_per_step = 1;
  bool count = true;                         // expert traffic; off only to measure what counting costs
  std::chrono::milliseconds window{10'000};  // of the counts
  std::chrono::milliseconds stall_timeout{30'000};
  uint64_t memory_bytes = 0;  // what may be used; 0: what the system says is available
};

}  // namespace kindred::engine
