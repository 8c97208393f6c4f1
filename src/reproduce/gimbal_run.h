// All of Gimbal's comparisons: the test bed fitted to what the paper says of its baseline, then every system on it, and
// what would have to be otherwise.
//
// Thread-safety: run_gimbal() starts threads of its own and joins them.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "reproduce/gimbal_cluster.h"
#include "reproduce/gimbal_paper.h"

namespace kindred::reproduce {

// Where the time goes by which the test bed is slower than the profile.
enum class GimbalSlow { kAll, kHost, kExperts, kLinks };
inline constexpr std::array kGimbalSlow = {GimbalSlow::kAll, GimbalSlow::kHost, GimbalSlow::kExperts,
                                           GimbalSlow::kLinks};
std::string_view to_string(GimbalSlow slow);

struct GimbalOptions {
  sim::Profile profile;
  sim::Trace trace;
  GimbalBaseline baseline = kGimbalBaseline;  // to be fitted to; small runs have another one
  uint32_t requests = 1000;
  uint32_t domains = 8;
  uint32_t seeds = 3;
  std::vector<double> rates = {kGimbalRates.begin(), kGimbalRates.end()};
  std::vector<sim::LengthMix> mixes = {};  // empty: all five
  bool scans = true;                       // of two mixes, with the fit's seed
  size_t threads = 1;
  std::function<void(const std::string& what, size_t done, size_t of)> on_run = {};  // from any thread, one at a time
};

// The law that makes the baseline hold as many requests at 4 a second as the paper's (GimbalBaseline::running).
struct GimbalFit {
  GimbalSlow slow = GimbalSlow::kAll;
  GimbalLaw law = {};
  GimbalCell baseline = {};  // vllm at 4 a second, mean over mixes
};

struct GimbalResult {
  std::string arm;
  std::string variant = {};  // empty: the main grid; else the name of a scan
  sim::LengthMix mix = sim::LengthMix::kRandom;
  double rate = 0;
  uint64_t seed = 0;
  GimbalCell cell = {};
};

struct GimbalReproduction {
  std::vector<GimbalFit> fits;  // the first is that of the main grid
  std::vector<GimbalResult> results;
  std::vector<std::string> variants;  // in order; each with vllm at 4 a second to compare with

  struct Slice {
    std::string arm;
    std::string variant = {};
    double rate = 0;  // 0: all
  };
  GimbalCell mean(const Slice& slice) const;
  // Geometric mean of an arm's figure over another's on the same mix, rate and seed, minus 1; NaN: no such cells.
  double change(const Slice& slice, std::string_view against, double GimbalCell::*figure) const;
};

// Error: of the fit (no law comes near the baseline), or of a run.
Result<GimbalReproduction> run_gimbal(const GimbalOptions& options);

}  // namespace kindred::reproduce
