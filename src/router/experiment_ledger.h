// What a switchback experiment has seen (policy/switchback.h): per slice, the means over its requests, its
// throughput and the experts that were active; and what follows from it.
//
// The seam at the start of each slice is not looked at: the workers still have the last policy's requests. A
// request counts for the slice in which it began, if that was behind the seam; where it ended does not matter, or
// a policy that makes requests slow would lose its slowest from the count. Slices should be much longer than
// requests; how many ended in a later one is reported.
//
// Bounded: kMaxSlices slices; the oldest go.
// Thread-safety: none.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "policy/switchback.h"

namespace kindred::router {

// Times in seconds since the experiment's start.
struct ExperimentPlan {
  std::vector<std::string> arms;  // names; the first is the control
  double slice_s = 30, seam_s = 5;
  uint64_t seed = 1;
  double level = 0.95;
};

class ExperimentLedger {
 public:
  static constexpr size_t kMaxSlices = 8192;

  explicit ExperimentLedger(ExperimentPlan plan)
      : plan_(std::move(plan)), schedule_(static_cast<uint32_t>(plan_.arms.size()), plan_.seed) {}

  uint64_t slice_at(double time_s) const { return static_cast<uint64_t>(time_s / plan_.slice_s); }
  uint32_t arm_at(double time_s) const { return schedule_.arm_of(slice_at(time_s)); }
  bool in_seam(double time_s) const {
    return time_s - static_cast<double>(slice_at(time_s)) * plan_.slice_s < plan_.seam_s;
  }
  const ExperimentPlan& plan() const { return plan_; }

  // A request that ended well.
  void request(double began_s, double ended_s, std::optional<double> ttft_s, std::optional<double> tpot_s);
  // What was measured over the slice behind its seam; nothing where it could not be.
  void window(uint64_t slice, std::optional<double> tokens_per_s, std::optional<double> active_experts);

  // Of the slices that are over at `now_s`.
  Json report(double now_s) const;

 private:
  enum Measure { kTtft, kTpot, kThroughput, kActive, kMeasures };
  struct Sum {
    double sum = 0;
    uint64_t count = 0;
    void add(double value) {
      sum += value;
      ++count;
    }
  };
  struct Slice {
    std::array<Sum, kMeasures> measures;
    uint64_t requests = 0, crossed = 0;
  };

  Slice& at(uint64_t slice);
  // (control, arm) of each block that is over and has both.
  std::vector<std::pair<double, double>> pairs(Measure measure, uint32_t arm, uint64_t slices_over) const;
  std::optional<double> value(uint64_t slice, Measure measure) const;

  ExperimentPlan plan_;
  policy::SwitchbackSchedule schedule_;
  std::map<uint64_t, Slice> slices_;
  uint64_t in_seams_ = 0;
};

}  // namespace kindred::router
