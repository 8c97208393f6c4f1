// `kindred bench pressure`, in parts: what is compared, the grid of simulations, and what is said of it.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "cli/bench.h"
#include "policy/engine_policy.h"
#include "policy/queue_order.h"
#include "sim/length_mix.h"
#include "sim/trace.h"

namespace kindred::cli {

struct PressureBench {
  int64_t requests = 1000, seeds = 3, first_seed = 1, threads = 0;
  std::vector<std::string> mixes;     // empty: all
  std::vector<std::string> policies;  // empty: all; the first is what the others are compared with
  std::vector<std::string> setups;    // empty: dp2 and dp4
  double scale = 1;                   // of all rates
  std::string profile = "h100-qwen3-30b-a3b", trace;
  policy::PressureOptions pressure = {};
  bool quick = false, ablation = false;
  // Of running processes instead (cli/bench_pressure_live.h).
  bool live = false;
  int64_t engines = 2, token_budget = 64, longest_prompt = 512;
  double seconds = 20;
  std::vector<std::string> live_rates;  // requests a second; empty: by what the engines can do
  std::string model, pace;
  BenchOutput output;
};

// Engines of one worker.
struct PressureSetup {
  std::string_view name, about;
  uint32_t engines = 2, ranks = 1;
  double highest_rate = 1;  // requests a second: about where request-count begins to queue without end
};

// Who is compared: an engine policy, and the order of engines' queues.
struct PressureArm {
  std::string name;
  policy::EnginePolicyOptions engine;
  policy::QueuePolicy queue = policy::QueuePolicy::kFcfs;
};

// Of one run, or a mean over runs.
struct PressureFigures {
  static constexpr size_t kCount = 10;
  double ttft_s = 0, ttft_p99_s = 0, tpot_s = 0, total_s = 0;
  double requests_per_s = 0, tokens_per_s = 0;
  double gap_tokens_per_s = 0;  // of prompts, between the engines with the most and the least; mean over seconds
  double running = 0;           // requests of an engine, over time
  double kv = 0;                // share in use, over time
  double preemptions = 0;

  std::array<double*, kCount> all() {
    return {&ttft_s,       &ttft_p99_s,       &tpot_s,  &total_s, &requests_per_s,
            &tokens_per_s, &gap_tokens_per_s, &running, &kv,      &preemptions};
  }
};

struct PressureGrid {
  std::vector<PressureSetup> setups;
  std::vector<sim::LengthMix> mixes;
  std::vector<double> loads;
  std::vector<PressureArm> arms;
  int64_t seeds = 0;
  std::vector<PressureFigures> cells;  // [setup, mix, load, seed, arm]
  uint64_t failed = 0;                 // requests that did not end well, in all runs
  double took_s = 0;

  size_t at(size_t setup, size_t mix, size_t load, size_t seed, size_t arm) const {
    return (((setup * mixes.size() + mix) * loads.size() + load) * static_cast<size_t>(seeds) + seed) * arms.size() +
           arm;
  }
  // Which cells a mean is over; kAny: all.
  static constexpr size_t kAny = SIZE_MAX;
  struct Slice {
    size_t setup = kAny, mix = kAny, load = kAny;
  };
  PressureFigures mean(const Slice& slice, size_t arm) const;
  // Geometric mean, over the slice's cells, of an arm's figure against the first arm's, minus 1.
  double change(const Slice& slice, size_t arm, double PressureFigures::*figure) const;

 private:
  // Each of the slice's cells of an arm, with the first arm's.
  template <class Visit>
  void visit(const Slice& slice, size_t arm, const Visit& visit) const;
};

std::vector<PressureArm> pressure_arms(const PressureBench& bench);
// Of the conversation trace, or of the file that the bench was told: lengths for the mixes.
Result<sim::Trace> pressure_lengths(const PressureBench& bench);
Result<PressureGrid> run_pressure_grid(const PressureBench& bench, std::vector<PressureArm> arms);

std::string pressure_text(const PressureGrid& grid);
Json pressure_json(const PressureGrid& grid);
Json pressure_figures_json(const PressureFigures& figures);
Status draw_pressure(const PressureGrid& grid, const std::string& folder, const std::string& note);

}  // namespace kindred::cli
