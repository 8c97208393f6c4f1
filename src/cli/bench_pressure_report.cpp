// What `kindred bench pressure` says of its figures.

#include <fmt/format.h>

#include <cmath>

#include "cli/bench_pressure.h"
#include "cli/plot.h"
#include "cli/terminal.h"

namespace kindred::cli {
namespace {

using Slice = PressureGrid::Slice;
using Figure = double PressureFigures::*;

std::string ratio(double change) { return std::isfinite(change) ? fmt::format("{:+.1f} %", 100 * change) : "-"; }
std::string milliseconds(double s) { return fmt::format("{:.0f}", s * 1e3); }

// Against the first arm; of means over the slice.
std::string of_means(const PressureGrid& grid, const Slice& slice, size_t arm, Figure figure) {
  if (arm == 0) return "";
  return ratio(grid.mean(slice, arm).*figure / (grid.mean(slice, 0).*figure) - 1);
}

std::string arms_table(const PressureGrid& grid, size_t setup) {
  Table table({"policy", "TTFT ms", "change", "run by run", "p99 ms", "change", "run by run", "TPOT ms", "change",
               "end-to-end s", "requests/s", "gap tokens/s", "running", "KV", "preempted"});
  const Slice slice{.setup = setup};
  for (size_t arm = 0; arm < grid.arms.size(); ++arm) {
    const PressureFigures f = grid.mean(slice, arm);
    const auto by_run = [&](Figure figure) {
      return arm == 0 ? std::string() : ratio(grid.change(slice, arm, figure));
    };
    table.row({grid.arms[arm].name, milliseconds(f.ttft_s), of_means(grid, slice, arm, &PressureFigures::ttft_s),
               by_run(&PressureFigures::ttft_s), milliseconds(f.ttft_p99_s),
               of_means(grid, slice, arm, &PressureFigures::ttft_p99_s), by_run(&PressureFigures::ttft_p99_s),
               fmt::format("{:.2f}", f.tpot_s * 1e3), of_means(grid, slice, arm, &PressureFigures::tpot_s),
               fmt::format("{:.2f}", f.total_s), fmt::format("{:.3f}", f.requests_per_s),
               fmt::format("{:.0f}", f.gap_tokens_per_s), fmt::format("{:.1f}", f.running),
               fmt::format("{:.1f} %", 100 * f.kv), fmt::format("{:.1f}", f.preemptions)});
  }
  return table.text();
}

// One row a rate or a mix: mean and p99 of TTFT of the first arm, and how the others change them.
std::string slices_table(const PressureGrid& grid, size_t setup, bool by_load, Figure figure,
                         const std::string& title) {
  std::vector<std::string> header = {title, grid.arms[0].name + " ms"};
  for (size_t arm = 1; arm < grid.arms.size(); ++arm) header.push_back(grid.arms[arm].name);
  Table table(header);
  const size_t rows = by_load ? grid.loads.size() : grid.mixes.size();
  for (size_t row = 0; row < rows; ++row) {
    Slice slice{.setup = setup};
    (by_load ? slice.load : slice.mix) = row;
    const double rate = by_load ? grid.loads[row] * grid.setups[setup].highest_rate : 0;
    std::vector<std::string> cells = {
        by_load ? fmt::format("{:.1f}/s", rate) : std::string(sim::to_string(grid.mixes[row])),
        milliseconds(grid.mean(slice, 0).*figure)};
    for (size_t arm = 1; arm < grid.arms.size(); ++arm) cells.push_back(of_means(grid, slice, arm, figure));
    table.row(std::move(cells));
  }
  return table.text();
}

Chart rate_chart(const PressureGrid& grid, size_t setup, Figure figure, double scale, const Chart& as) {
  Chart chart = as;
  for (size_t arm = 0; arm < grid.arms.size(); ++arm) {
    Series series;
    series.name = grid.arms[arm].name;
    for (size_t load = 0; load < grid.loads.size(); ++load) {
      series.x.push_back(grid.loads[load] * grid.setups[setup].highest_rate);
      series.y.push_back(grid.mean({.setup = setup, .load = load}, arm).*figure * scale);
    }
    chart.series.push_back(std::move(series));
  }
  chart.y_from_zero = true;
  return chart;
}

BarChart bars(const PressureGrid& grid, Figure figure, double scale, std::string title, std::string y_label,
              const std::string& note) {
  BarChart chart{std::move(title), std::move(y_label), {}, {}, {}, note};
  for (const PressureSetup& setup : grid.setups) chart.categories.emplace_back(setup.name);
  for (size_t arm = 0; arm < grid.arms.size(); ++arm) {
    chart.groups.push_back(grid.arms[arm].name);
    chart.values.emplace_back();
    for (size_t s = 0; s < grid.setups.size(); ++s) {
      chart.values.back().push_back(grid.mean({.setup = s}, arm).*figure * scale);
    }
  }
  return chart;
}

}  // namespace

std::string pressure_text(const PressureGrid& grid) {
  std::string out;
  for (size_t s = 0; s < grid.setups.size(); ++s) {
    const PressureSetup& setup = grid.setups[s];
    out += fmt::format("{}: {}; {} mixes, {} rates of {:.1f} to {:.1f} requests/s, {} seeds\n\n{}\n", setup.name,
                       setup.about, grid.mixes.size(), grid.loads.size(), grid.loads.front() * setup.highest_rate,
                       grid.loads.back() * setup.highest_rate, grid.seeds, arms_table(grid, s));
    out += slices_table(grid, s, /*by_load=*/true, &PressureFigures::ttft_s, "mean TTFT") + "\n";
    out += slices_table(grid, s, /*by_load=*/true, &PressureFigures::ttft_p99_s, "p99 TTFT") + "\n";
    out += slices_table(grid, s, /*by_load=*/false, &PressureFigures::ttft_s, "mean TTFT") + "\n";
    out += slices_table(grid, s, /*by_load=*/false, &PressureFigures::ttft_p99_s, "p99 TTFT") + "\n";
  }
  out += fmt::format(
      "change: against {}, of means over runs; run by run: geometric mean of the changes of runs on the same requests\n"
      "gap: prompt tokens a second, between the engines with the most and the least; {} simulations in {:.0f} s{}\n",
      grid.arms[0].name, grid.cells.size(), grid.took_s,
      grid.failed > 0 ? fmt::format("; {} requests failed", grid.failed) : std::string());
  return out;
}

Json pressure_figures_json(const PressureFigures& f) {
  return {{"ttft_s", f.ttft_s},
          {"ttft_p99_s", f.ttft_p99_s},
          {"tpot_s", f.tpot_s},
          {"total_s", f.total_s},
          {"requests_per_s", f.requests_per_s},
          {"tokens_per_s", f.tokens_per_s},
          {"gap_tokens_per_s", f.gap_tokens_per_s},
          {"running", f.running},
          {"kv", f.kv},
          {"preemptions", f.preemptions}};
}

Json pressure_json(const PressureGrid& grid) {
  Json out = {{"bench", "pressure"}, {"took_s", grid.took_s}, {"failed", grid.failed}, {"rows", Json::array()}};
  for (size_t s = 0; s < grid.setups.size(); ++s) {
    for (size_t m = 0; m < grid.mixes.size(); ++m) {
      for (size_t l = 0; l < grid.loads.size(); ++l) {
        for (size_t arm = 0; arm < grid.arms.size(); ++arm) {
          out["rows"].push_back({{"setup", grid.setups[s].name},
                                 {"mix", sim::to_string(grid.mixes[m])},
                                 {"rate", grid.loads[l] * grid.setups[s].highest_rate},
                                 {"policy", grid.arms[arm].name},
                                 {"mean", pressure_figures_json(grid.mean({.setup = s, .mix = m, .load = l}, arm))}});
        }
      }
    }
  }
  return out;
}

Status draw_pressure(const PressureGrid& grid, const std::string& folder, const std::string& note) {
  for (size_t s = 0; s < grid.setups.size(); ++s) {
    const std::string_view name = grid.setups[s].name;
    const auto chart = [&](std::string title, std::string y_label) {
      return Chart{fmt::format("{}, {}", title, name), "requests a second", std::move(y_label), {}, note};
    };
    const std::pair<std::string, std::string> drawings[] = {
        {"ttft", line_chart(rate_chart(grid, s, &PressureFigures::ttft_s, 1e3, chart("Mean TTFT", "ms")))},
        {"ttft-p99", line_chart(rate_chart(grid, s, &PressureFigures::ttft_p99_s, 1e3, chart("p99 TTFT", "ms")))},
        {"tpot", line_chart(rate_chart(grid, s, &PressureFigures::tpot_s, 1e3, chart("Mean TPOT", "ms")))},
        {"gap", line_chart(rate_chart(grid, s, &PressureFigures::gap_tokens_per_s, 1,
                                      chart("Prompt gap between engines", "tokens a second")))},
    };
    for (const auto& [what, svg] : drawings) {
      if (Status ok = save_svg(folder, fmt::format("bench-pressure-{}-{}", what, name), svg); !ok) return ok;
    }
  }
  const auto draw = [&](std::string_view what, const BarChart& chart) {
    return save_svg(folder, fmt::format("bench-pressure-{}", what), bar_chart(chart));
  };
  if (Status ok = draw(
          "running", bars(grid, &PressureFigures::running, 1, "Running requests of an engine", "mean over time", note));
      !ok) {
    return ok;
  }
  return draw("kv", bars(grid, &PressureFigures::kv, 100, "KV cache in use", "%, mean over time", note));
}

}  // namespace kindred::cli
