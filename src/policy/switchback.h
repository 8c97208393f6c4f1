// Switchback experiments: policies take turns on one fleet, by time slice, since workers are shared and a
// comparison of requests side by side would compare each policy with what the others did to the workers.
//
// Design. Slices of equal length; a block is one slice of each arm, in an order drawn anew for each block. What
// drifts (traffic, the time of day) drifts alike for a block's slices.
//
// Analysis. The slice is the unit: requests of one slice share its conditions and are no independent samples. Per
// block, the difference of the arm's value and that of the control (the first arm); over blocks, their mean with
// Student's t interval, n - 1 degrees of freedom, for whole blocks only. A difference is claimed if its interval
// excludes 0 and there are kMinBlocks blocks. Each interval stands for itself: with several arms and measures, some
// five in a hundred at a level of 0.95 exclude 0 by chance.
//
// Thread-safety: plain values and pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace kindred::policy {

// Which arm is in force in which slice.
class SwitchbackSchedule {
 public:
  // `arms` > 0. Equal seeds, equal orders.
  SwitchbackSchedule(uint32_t arms, uint64_t seed) : arms_(arms), seed_(seed) {}

  uint32_t arms() const { return arms_; }
  uint64_t block_of(uint64_t slice) const { return slice / arms_; }
  std::vector<uint32_t> order_of(uint64_t block) const;  // a permutation of the arms
  uint32_t arm_of(uint64_t slice) const { return order_of(block_of(slice))[slice % arms_]; }

 private:
  uint32_t arms_;
  uint64_t seed_;
};

inline constexpr size_t kMinBlocks = 5;

struct PairedEstimate {
  size_t blocks = 0;
  double control = 0, arm = 0;  // means over blocks
  double difference = 0;        // arm - control
  double low = 0, high = 0;     // its interval
  bool claimed = false;
};

// `blocks`: (control, arm) of each. `level` in (0, 1). No value with less than two blocks.
std::optional<PairedEstimate> paired_difference(std::span<const std::pair<double, double>> blocks, double level);

// The t that |t| exceeds with probability 1 - level. `degrees` > 0.
double students_t(double level, size_t degrees);

}  // namespace kindred::policy
