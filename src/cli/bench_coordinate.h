// `kindred bench coordinate`, in parts: what is compared, the runs, and what is said of them.
//
// Data-parallel engines of one process over expert ranks. Requests come from domains, each at home at one engine: some
// are bound to their home engine, as sessions are, and an engine policy sends the others. What is compared is who
// coordinates: the choice of engines (the upper level), the placement of experts (the lower level), both, and both with
// the ranks' load as a part of the engines' pressure.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "cli/bench.h"
#include "cli/numa_link.h"
#include "place/solve.h"
#include "reproduce/gimbal_cluster.h"

namespace kindred::cli {

struct CoordinateBench {
  std::string model, prompts, type = "f16";
  std::vector<std::string> ranks;  // empty: 2 and 4
  int64_t factor = 8, engines = 2, sequences = 8, token_budget = 128, longest_prompt = 256, output_tokens = 32;
  int64_t window_ms = 500, seed = 1;
  double settle_s = 6, seconds = 12, bound_share = 0.7;
  double way_us = 0;  // of a token to a remote expert, as placement counts it; 0: as the worker's controller does
  bool quick = false;
  BenchOutput output;
};

enum class ExpertPlacing { kStatic, kEplb, kFlow };

struct CoordinateArm {
  std::string_view name;
  bool pressure = false;  // else request-count
  ExpertPlacing placing = ExpertPlacing::kStatic;
  bool feedback = false;  // the expert term of pressure
};
std::span<const CoordinateArm> coordinate_arms();

struct CoordinateFigures {
  double imbalance = 1, dispatch_imbalance = 1;  // engine/rank_counts.h
  double remote_share = 0;
  double rank_active = 0;   // distinct experts of a rank in a layer's dispatch, mean over ranks
  double pressure_gap = 0;  // largest over mean expert pressure of the engines, in the measured time
  double moves = 0, moved_mb = 0, placements = 0;  // of the whole run
  double step_ms = 0;                              // mean
  double step_cpu_ms = 0;                          // processor time of the process over steps
  double ttft_ms = 0;                              // mean
  double requests = 0;                             // ended while measured
};

struct CoordinateRank {
  uint32_t ranks = 0;
  std::vector<CoordinateFigures> arms;  // as coordinate_arms()
};

struct CoordinateResult {
  std::vector<CoordinateRank> tables;
  uint32_t experts = 0, layers = 0, top_k = 0;
  double expert_mb = 0;
  std::vector<std::string> homes;  // [engine]: its domains
  std::vector<NumaLink> links;     // empty: one node
};

// The same arms on two data-parallel engines, each over two H100s, with the experts of Qwen3-30B-A3B on all four.
struct CoordinateSimulation {
  uint32_t requests = 2000;
  double rate = 24;                         // a second
  std::vector<reproduce::GimbalCell> arms;  // as coordinate_arms()
};
Result<CoordinateSimulation> simulate_coordinate(const CoordinateBench& bench);

// Error: kInvalid (naming the flag), and those of loading, widening and serving.
Result<CoordinateResult> run_coordinate(const CoordinateBench& bench);

}  // namespace kindred::cli
