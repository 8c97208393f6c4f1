// `kindred reproduce`, in parts.
#pragma once

#include <string>
#include <vector>

#include "cli/commands.h"
#include "reproduce/eldr_run.h"
#include "reproduce/gimbal_run.h"

namespace kindred::cli {

// Predicted beside measured: what the page, the terminal and JSON show.
struct EldrCellRow {
  reproduce::Workload workload = reproduce::Workload::kTask;
  std::string model, policy;
  uint32_t rate = 0;
  double predicted_ms = 0, measured_ms = 0;          // median TPOT
  double predicted_change = 0, measured_change = 0;  // against round-robin's own, shares
  double predicted_p99_ms = 0, measured_p99_ms = 0;
  double predicted_ttft_ms = 0, measured_ttft_ms = 0;

  double error() const { return predicted_ms / measured_ms - 1; }
};

struct EldrComparison {
  std::vector<EldrCellRow> rows;  // main cells
  struct Group {                  // of a model and workload
    reproduce::Workload workload = reproduce::Workload::kTask;
    std::string model;
    double predicted_gain = 0, measured_gain = 0;  // ELDR's change against round-robin, mean over rates
    double median_error = 0;                       // absolute, of all policies but round-robin
    double ranked_alike = 0;                       // pairs of policies that both order the same way, mean over rates
    double experts_change = 0;                     // ELDR's distinct experts against round-robin's, mean over rates
  };
  std::vector<Group> groups;
  double median_error = 0;  // absolute, of all cells but round-robin's
};

EldrComparison compare_eldr(const reproduce::EldrReproduction& run, std::span<const reproduce::EldrRow> measured);

// Tables for the terminal.
std::string eldr_text(const reproduce::EldrReproduction& run, const EldrComparison& comparison);
// eldr.md and its plots. `folder` also has the ablations' published tables read from `tables`. Error: kIo.
Status write_eldr_page(const std::string& folder, const std::string& tables, const std::string& command,
                       const reproduce::EldrReproduction& run, const EldrComparison& comparison);

// The same for Gimbal.
int reproduce_gimbal(Args args);
std::string gimbal_text(const reproduce::GimbalReproduction& run);
Status write_gimbal_page(const std::string& folder, const std::string& command,
                         const reproduce::GimbalReproduction& run);

// For pages.
std::string signed_percent(double share);  // "+1.2 %"
// Markdown from rows of cells; the first row is the header.
std::string markdown_table(const std::vector<std::vector<std::string>>& rows);
// For the terminal, likewise.
std::string plain_table(const std::vector<std::vector<std::string>>& rows);
// Makes the folder. Error: kIo.
Status write_page(const std::string& folder, const std::string& name, const std::string& text);

}  // namespace kindred::cli
