// All of ELDR's cells: calibrated on round-robin, predicted for every policy.
//
// Thread-safety: run_eldr() starts threads of its own and joins them.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "reproduce/eldr_cluster.h"

namespace kindred::reproduce {

struct EldrOptions {
  std::string folder;  // of the published tables
  double seconds = 120;
  std::vector<uint32_t> rates = {kEldrRates.begin(), kEldrRates.end()};
  std::vector<std::string> models;  // keys; empty: all
  uint32_t calibration = 1000;      // requests that cohorts are fitted to
  bool gates = true;                // the variant "gate", which takes its time
  bool scaling = true;              // "8D" and "24D", whose cohorts are fitted apart
  bool large = true;                // Qwen3-235B, if the first model runs
  size_t threads = 1;
  uint64_t seed = 1;
  std::function<void(size_t done, size_t of)> on_cell = {};  // from any thread, one at a time
};

struct Predicted {
  Workload workload = Workload::kTask;
  std::string model, policy;
  std::string variant;  // empty: the main table's; "tau 0.2", "vanilla", "8D", "shuffled", ...
  uint32_t rate = 0;
  Cell cell;
};

struct EldrModelFit {
  std::string model;
  LawFit fit;
  PrefillLaw prefill;
};

struct EldrReproduction {
  std::vector<EldrModelFit> fits;
  // Main ones; rr and eldr at "8D" and "24D"; at 60 requests a second "tau 0", "tau 0.2", "tau 0.3", "vanilla", "gate"
  // and, for rr and eldr, "shuffled"; for task "by qwen": rr and eldr by the first model's law, scaled to this one's
  // layers, with this one's experts. For GPT-OSS-120B's task at 100 requests a second, 1P16D and 2,000 prompts in turn
  // "cache off" and "cache on"; for large_model()'s language at kLargeRates rr and eldr without a variant.
  std::vector<Predicted> cells;
};

// Calibrates on the round-robin rows of the tables alone (all others are deleted first), then runs everything.
// Error: that of reading the tables, or of a run.
Result<EldrReproduction> run_eldr(const EldrOptions& options);

const Predicted* find_cell(std::span<const Predicted> cells, Workload workload, std::string_view model,
                           std::string_view policy, uint32_t rate, std::string_view variant = {});

}  // namespace kindred::reproduce
