// What the parts of `kindred place` share: its flags, its results, and how they are shown.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/result.h"
#include "place/calibrate.h"
#include "place/explain.h"
#include "place/migration.h"
#include "place/solve.h"

namespace kindred::cli {

struct PlaceArguments {
  std::string input, placement, distance;
  std::string solver = "flow";
  int64_t ranks = 0, sources = 0, redundant = 0;
  int64_t ranks_per_node = 0, nodes_per_rack = 0;
  double node_cost = 1, rack_cost = 1, far_cost = 1;
  place::Weights weights;
  double load_cap = 0;  // 0: none
  int64_t groups = 1, nodes = 1;
  double time_limit_s = 10;
  place::MigrationOptions migration;
  int64_t spare_experts = 1, experts_per_batch = 4;
  std::string output, vllm, sglang, plots;
  int64_t explain = 0;
  bool compare = false, calibrate = false, json = false;
  std::string profile = "h100-qwen3-30b-a3b";  // of the calibration's simulation
};

// How much higher than the proven bound `objective` can be at most, as a share of it; empty: nothing is proven.
std::optional<double> proven_gap(const place::Solution& solution, double objective);

struct PlaceRow {
  std::string name;
  place::Solution solution = {};
  std::vector<place::Cost> layers = {};
  double time_s = 0;

  place::Cost cost() const { return place::total(layers); }
  std::optional<double> gap() const { return proven_gap(solution, cost().objective); }
};

// Of one run: engines that send as the traffic has it, greedy every ten seconds.
struct PlaceSimulation {
  double ttft_s = 0, tpot_s = 0;  // means
  double remote_share = 0, max_over_mean = 0;
  uint64_t moved_experts = 0;
  double stalled_s = 0;
};
// Each source is an engine with its part of the ranks, each rank a GPU of `profile`. Error: kInvalid: the profile is of
// another model, or ranks do not divide among sources; or of the run.
Result<PlaceSimulation> simulate_weights(const place::Problem& problem, const place::Weights& weights,
                                         const std::string& profile, const place::MigrationOptions& migration);

struct PlaceCalibration {
  std::string reference;  // "exact" or "flow"
  double reference_gap = 0;
  std::vector<place::CalibrationPoint> points = {};
  place::CalibrationPoint uncalibrated = {};  // (1, 1, 0)
  // With the best weights and with (1, 1, 0); empty: `not_simulated` says why.
  std::optional<PlaceSimulation> simulated_best = {}, simulated_uncalibrated = {};
  std::string not_simulated = {};
};

struct PlaceResults {
  place::Problem problem;
  std::vector<std::string> source_names;          // [S], or empty
  std::vector<std::vector<uint32_t>> old_slots;   // [L][P], or empty
  std::vector<PlaceRow> rows;                     // the solver's first, then those to compare with
  std::optional<place::MigrationPlan> migration;  // with a placement before
  std::vector<place::MoveReason> reasons;         // with --explain
  std::optional<PlaceCalibration> calibration;    // with --calibrate
};

// Columns: name, objective, proven gap, remote tokens and share, max/mean load, moves, ms.
std::vector<std::string> place_table_header();
std::vector<std::string> place_table_row(const std::string& name, const place::Cost& cost, std::optional<double> gap,
                                         std::optional<double> time_s);

void print_place(const PlaceArguments& options, const PlaceResults& results);
Json place_json(const PlaceArguments& options, const PlaceResults& results);
Status write_place_plots(const PlaceArguments& options, const PlaceResults& results);

}  // namespace kindred::cli
