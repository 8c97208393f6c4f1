// `kindred reproduce eldr`: the published cluster results, predicted from round-robin alone.

#include "cli/reproduce.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <thread>

#include "base/config.h"
#include "base/json.h"
#include "cli/bench.h"
#include "cli/commands.h"
#include "cli/local_cluster.h"
#include "cli/terminal.h"

namespace kindred::cli {
namespace {

using reproduce::Workload;

struct ReproduceEldr {
  double seconds = 120;
  std::string tables, page;
  int64_t threads = 0, seed = 1;
  bool json = false;
};

ConfigSchema eldr_schema(ReproduceEldr& o) {
  ConfigSchema schema("reproduce eldr [--page docs/reproduction]",
                      "Predicts ELDR's published tables (8P16D of MI300X, three models, two workloads, five rates, six "
                      "policies) in the simulator, calibrated on their round-robin rows alone, and shows every error.");
  schema.real("seconds", &o.seconds, 10, 3600, "of arrivals at each rate; the artifact's are 120");
  schema.text("tables", &o.tables, "folder of the published tables; default: data/reference/eldr");
  schema.text("page", &o.page, "write eldr.md and its plots into this folder");
  schema.integer("threads", &o.threads, 0, 256, "cells run at a time; 0: one per core");
  schema.integer("seed", &o.seed, 1, std::numeric_limits<int64_t>::max(), "equal seeds give equal results");
  schema.flag("json", &o.json, "print all cells as JSON");
  return schema;
}

double median_of(std::vector<double> values) {
  if (values.empty()) return 0;
  std::ranges::sort(values);
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

// Share of pairs of policies that prediction and measurement order the same way. Pairs that were measured within 1 %
// of each other are left out: repeats differ by that.
double ranked_alike(std::span<const EldrCellRow* const> cells) {
  constexpr double kRepeats = 0.01;
  double same = 0, pairs = 0;
  for (size_t i = 0; i < cells.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      const double measured = cells[i]->measured_ms / cells[j]->measured_ms - 1;
      if (std::abs(measured) < kRepeats) continue;
      ++pairs;
      if ((cells[i]->predicted_ms < cells[j]->predicted_ms) == (measured < 0)) ++same;
    }
  }
  return pairs > 0 ? same / pairs : 1;
}

EldrComparison::Group compare_group(const reproduce::EldrReproduction& run, std::span<const EldrCellRow> rows,
                                    Workload workload, const std::string& model) {
  EldrComparison::Group out{.workload = workload, .model = model};
  std::vector<double> errors;
  double rates = 0;
  for (const uint32_t rate : reproduce::kEldrRates) {
    std::vector<const EldrCellRow*> cells;
    for (const EldrCellRow& row : rows) {
      if (row.workload != workload || row.model != model || row.rate != rate) continue;
      cells.push_back(&row);
      if (row.policy != "rr") errors.push_back(std::abs(row.error()));
      if (row.policy != "eldr") continue;
      out.predicted_gain += row.predicted_change;
      out.measured_gain += row.measured_change;
    }
    if (cells.empty()) continue;
    ++rates;
    out.ranked_alike += ranked_alike(cells);
    const auto* eldr = reproduce::find_cell(run.cells, workload, model, "eldr", rate);
    const auto* rr = reproduce::find_cell(run.cells, workload, model, "rr", rate);
    if (eldr != nullptr && rr != nullptr) out.experts_change += eldr->cell.experts / rr->cell.experts - 1;
  }
  if (rates > 0) {
    for (double* mean : {&out.predicted_gain, &out.measured_gain, &out.ranked_alike, &out.experts_change})
      *mean /= rates;
  }
  out.median_error = median_of(std::move(errors));
  return out;
}

Json cells_json(const reproduce::EldrReproduction& run, const EldrComparison& comparison) {
  Json out;
  out["median_error"] = comparison.median_error;
  for (const auto& fit : run.fits) {
    out["laws"].push_back({{"model", fit.model},
                           {"fixed_ms", fit.fit.law.fixed_ms},
                           {"expert_us", fit.fit.law.expert_us},
                           {"token_us", fit.fit.law.token_us},
                           {"kernel", fit.fit.law.kernel},
                           {"prefill_fixed_ms", fit.prefill.fixed_ms},
                           {"rms", fit.fit.rms}});
  }
  for (const EldrCellRow& row : comparison.rows) {
    out["cells"].push_back({{"workload", to_string(row.workload)},
                            {"model", row.model},
                            {"policy", row.policy},
                            {"rate", row.rate},
                            {"predicted_tpot50_ms", row.predicted_ms},
                            {"measured_tpot50_ms", row.measured_ms},
                            {"predicted_tpot99_ms", row.predicted_p99_ms},
                            {"measured_tpot99_ms", row.measured_p99_ms},
                            {"predicted_ttft50_ms", row.predicted_ttft_ms},
                            {"measured_ttft50_ms", row.measured_ttft_ms}});
  }
  for (const reproduce::Predicted& cell : run.cells) {
    if (cell.variant.empty() && cell.model != reproduce::large_model().key) continue;  // it is above
    out["variants"].push_back({{"workload", to_string(cell.workload)},
                               {"model", cell.model},
                               {"policy", cell.policy},
                               {"variant", cell.variant},
                               {"rate", cell.rate},
                               {"tpot50_ms", cell.cell.tpot50_ms},
                               {"tpot99_ms", cell.cell.tpot99_ms},
                               {"ttft50_ms", cell.cell.ttft50_ms},
                               {"batch", cell.cell.batch},
                               {"experts", cell.cell.experts}});
  }
  return out;
}

int reproduce_eldr(Args args) {
  ReproduceEldr o;
  ConfigSchema schema = eldr_schema(o);
  if (const auto status = parse_bench_flags(schema, args)) return *status;
  if (o.tables.empty()) o.tables = (std::filesystem::path(find_root()) / "data/reference/eldr").string();
  std::optional<Progress> progress;
  reproduce::EldrOptions options;
  options.folder = o.tables;
  options.seconds = o.seconds;
  options.threads = o.threads > 0 ? static_cast<size_t>(o.threads) : std::max(1U, std::thread::hardware_concurrency());
  options.seed = static_cast<uint64_t>(o.seed);
  options.on_cell = [&](size_t done, size_t of) {
    if (!progress) progress.emplace("cells", of);
    progress->set(done);
  };
  const auto run = reproduce::run_eldr(options);
  progress.reset();
  if (!run) return fail("reproduce eldr", run.error());
  const auto measured = reproduce::read_eldr_main(o.tables);
  if (!measured) return fail("reproduce eldr", measured.error());
  const EldrComparison comparison = compare_eldr(*run, *measured);
  if (o.json) fmt::print("{}\n", dump_json(cells_json(*run, comparison), 1));
  else fmt::print("{}", eldr_text(*run, comparison));
  if (o.page.empty()) return 0;
  const std::string command =
      o.seconds == 120 ? "kindred reproduce eldr" : fmt::format("kindred reproduce eldr --seconds {}", o.seconds);
  if (Status ok = write_eldr_page(o.page, o.tables, command, *run, comparison); !ok) {
    return fail("reproduce eldr", ok.error());
  }
  return 0;
}

}  // namespace

EldrComparison compare_eldr(const reproduce::EldrReproduction& run, std::span<const reproduce::EldrRow> measured) {
  EldrComparison out;
  std::vector<double> errors;
  for (const reproduce::EldrRow& row : measured) {
    const auto* cell = reproduce::find_cell(run.cells, row.workload, row.model, row.policy, row.rate);
    const auto* rr = reproduce::find_cell(run.cells, row.workload, row.model, "rr", row.rate);
    const auto* measured_rr = reproduce::find_row(measured, row.workload, row.model, "rr", row.rate);
    if (cell == nullptr || rr == nullptr || measured_rr == nullptr) continue;
    out.rows.push_back({.workload = row.workload,
                        .model = row.model,
                        .policy = row.policy,
                        .rate = row.rate,
                        .predicted_ms = cell->cell.tpot50_ms,
                        .measured_ms = row.tpot50_ms,
                        .predicted_change = cell->cell.tpot50_ms / rr->cell.tpot50_ms - 1,
                        .measured_change = row.tpot50_ms / measured_rr->tpot50_ms - 1,
                        .predicted_p99_ms = cell->cell.tpot99_ms,
                        .measured_p99_ms = row.tpot99_ms,
                        .predicted_ttft_ms = cell->cell.ttft50_ms,
                        .measured_ttft_ms = row.ttft50_ms});
    if (row.policy != "rr") errors.push_back(std::abs(out.rows.back().error()));
  }
  out.median_error = median_of(std::move(errors));
  for (const auto& fit : run.fits) {
    for (const Workload workload : reproduce::kWorkloads) {
      out.groups.push_back(compare_group(run, out.rows, workload, fit.model));
    }
  }
  return out;
}

std::string signed_percent(double share) { return fmt::format("{:+.1f} %", 100 * share); }

std::string markdown_table(const std::vector<std::vector<std::string>>& rows) {
  std::string out;
  for (size_t r = 0; r < rows.size(); ++r) {
    out += "|";
    for (const std::string& cell : rows[r]) out += " " + cell + " |";
    out += "\n";
    if (r > 0) continue;
    out += "|";
    for (size_t c = 0; c < rows[r].size(); ++c) out += c == 0 ? "---|" : "---:|";
    out += "\n";
  }
  return out;
}

std::string plain_table(const std::vector<std::vector<std::string>>& rows) {
  Table out(rows.front());
  for (size_t r = 1; r < rows.size(); ++r) out.row(rows[r]);
  return out.text();
}

Status write_page(const std::string& folder, const std::string& name, const std::string& text) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  const std::filesystem::path path = std::filesystem::path(folder) / name;
  std::ofstream out(path, std::ios::binary);
  out << text;
  out.flush();
  if (!out) return Error{ErrorCode::kIo, "cannot write " + path.string()};
  return {};
}

int run_reproduce(Args args) {
  const std::string_view usage =
      "usage: kindred reproduce eldr|gimbal [OPTIONS]\n\n"
      "  eldr     ELDR's tables (8P16D, expert-locality routing between decode workers)\n"
      "  gimbal   Gimbal's figures (DP 2, TP 2, EP 4: engines by pressure, experts by their traffic)\n\n"
      "`kindred reproduce eldr --help` lists the options.\n";
  if (!args.empty() && std::string_view(args[0]) == "eldr") return reproduce_eldr(args.subspan(1));
  if (!args.empty() && std::string_view(args[0]) == "gimbal") return reproduce_gimbal(args.subspan(1));
  const bool asked = !args.empty() && (std::string_view(args[0]) == "--help" || std::string_view(args[0]) == "-h");
  fmt::print(asked ? stdout : stderr, "{}", usage);
  return asked ? 0 : 2;
}

}  // namespace kindred::cli
