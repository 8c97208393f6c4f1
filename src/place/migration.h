// From one placement to another: which experts move in which order, what that takes, and whether it pays.
//
// Order. A rank has its slots, in every layer, and `spare_experts` beyond. A move copies an expert and then frees the
// old copy, so a rank that others wait for must lose one first. Where all wait in a ring, a spare slot opens it; with
// none, two experts change places (through a buffer outside the slots). Moves that save most come first.
// Batches. What is in one batch may run at once: no rank sends or receives more than `experts_per_batch`, room is
// counted as if all arrivals came before the first slot is freed, and an expert is in one step only, unless it is only
// dropped. A batch is over when its slowest link is.
// Worth. The gain of a window must cover the cost within `windows` windows, with `margin` to spare; else the plan
// says so and is not to be applied.
//
// Thread-safety: pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/result.h"
#include "place/problem.h"

namespace kindred::place {

enum class StepKind {
  kMove,  // from -> to; then `from` frees it
  kCopy,  // from -> to; both keep it
  kDrop,  // `from` frees it; no bytes
  kSwap,  // `expert` from -> to, and `other` to -> from
};
std::string_view to_string(StepKind kind);

struct MigrationStep {
  StepKind kind = StepKind::kMove;
  uint32_t batch = 0;  // ascending over the plan
  uint32_t layer = 0, expert = 0, from = 0, to = 0;
  uint32_t other = 0;  // of kSwap
};

// Time and size of what is moved. The defaults are those of Qwen3-30B-A3B in bf16; 20 GB/s a rank is what Gimbal's
// 0.72 s for a rearrangement of all its layers on four H100s come to if every expert moved (section 2.2.2).
struct MigrationOptions {
  double expert_bytes = 3.0 * 2048 * 768 * 2;  // up, gate and down
  double link_bytes_per_s = 20e9;              // of a rank, each way
  double token_bytes = 2.0 * 2048 * 2;         // a token's way to a remote expert and back
  double busy_token_s = 50e-9;                 // a token's time on the busiest rank, which all others wait for
  uint32_t spare_experts = 1;                  // room of a rank beyond its slots, over all layers
  uint32_t experts_per_batch = 4;              // that a rank sends, and that it receives
  double windows = 10;                         // like this one that the traffic is expected to last
  double margin = 1.5;                         // gain over cost, at least

  Status check() const;
};

struct MigrationPlan {
  std::vector<MigrationStep> steps;
  uint32_t batches = 0;
  double bytes = 0;   // over links
  double cost_s = 0;  // of all batches, one after another
  double gain_s = 0;  // per window; negative: the new placement is worse
  bool pays = false;
  std::string reason;  // why it pays or does not, in words
};

// From problem.old to `target`, judged by problem.traffic. Error: kInvalid: there is no old placement, or `target` is
// not one for this problem.
Result<MigrationPlan> plan_migration(const Problem& problem, const Placement& target,
                                     const MigrationOptions& options = {});

// Seconds of a window that depend on the placement, by the figures of `options`: what is remote crosses all ranks'
// links at once, and in each layer all wait for the busiest rank.
double window_s(const Cost& cost, uint32_t ranks, const MigrationOptions& options);

// Weights by which the objective agrees with window_s(), exactly so with two ranks: a token's way is 1, a token off the
// mean half of a busy token (what one rank has too much others have too little), a move its part of what must be
// gained.
Weights weights_of(const MigrationOptions& options, uint32_t ranks);

}  // namespace kindred::place
