// What the parts of `kindred fit` share: its flags, its results, and how they are shown.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/result.h"
#include "expert/activations.h"
#include "expert/fit.h"
#include "expert/prediction.h"

namespace kindred::cli {

struct FitArguments {
  std::vector<std::string> input;
  std::string output = "cohorts.safetensors";
  std::string transform = "count-idf";
  std::string balance = "count";
  std::string plots;  // folder, or empty
  int64_t workers = 0;
  int64_t pairs = 20'000;
  int64_t restarts = 8;
  int64_t seed = 1;
  int64_t batch = 8;
  double tolerance = 0.05;
  bool all_layers = false;
  bool unbalanced = false;
  bool compare = false;
  bool predict = false;
  bool json = false;
};

// What was asked for; empty or absent otherwise.
struct FitResults {
  expert::Activations activations;
  std::optional<expert::FitReport> fit;            // with --workers
  std::vector<expert::TransformScore> transforms;  // with --compare
  std::optional<expert::Prediction> prediction;    // with --predict, as are the next
  std::vector<expert::BatchComparison> batches;
  std::vector<std::string> plots;  // names of the files written
};

void print_fit(const FitArguments& options, const FitResults& results);
Json fit_json(const FitArguments& options, const FitResults& results);

// Writes the SVGs of what is there to options.plots, and their names to results.plots. Error: kIo, or
// kInvalid: labels that are no domains.
Status write_fit_plots(const FitArguments& options, FitResults& results);

}  // namespace kindred::cli
