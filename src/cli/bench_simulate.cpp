// `kindred bench simulate`: how much faster than real time the simulator is, on one core, and how that grows with the
// cluster. Set up (drawing experts, fitting cohorts) is not part of a run's time; it is shown beside it.

#include <fmt/format.h>

#include <ctime>
#include <vector>

#include "cli/bench.h"
#include "cli/plot.h"
#include "cli/simulate.h"
#include "cli/terminal.h"

namespace kindred::cli {
namespace {

constexpr double kAimTimesRealTime = 100;  // 8P16D at 100 requests a second
constexpr double kRatePerWorker = 100.0 / 24;

struct SimulateBench {
  double seconds = 60;
  std::string profile = "h200-qwen3-30b-a3b";
  std::vector<std::string> policies = {"least-loaded", "locality-band"};
  int64_t rounds = 3, seed = 1;
  BenchOutput output;
};

struct ClusterSize {
  uint32_t prefill, decode;
  std::string text() const { return fmt::format("{}P{}D", prefill, decode); }
  double rate() const { return kRatePerWorker * (prefill + decode); }
};
constexpr ClusterSize kSizes[] = {{2, 4}, {4, 8}, {8, 16}, {16, 32}, {21, 43}};

struct SpeedRow {
  ClusterSize size;
  std::string policy;
  uint64_t steps = 0;
  double simulated_s = 0, took_s = 0, setup_s = 0, decode_batch = 0;

  double times_real() const { return simulated_s / took_s; }
  double us_per_step() const { return 1e6 * took_s / static_cast<double>(steps); }
};

double processor_s(const auto& work) {
  const std::clock_t began = std::clock();
  work();
  return static_cast<double>(std::clock() - began) / CLOCKS_PER_SEC;
}

// The best of some rounds: others use the machine, too, and the work is the same each time.
Status measure_size(const SimulateBench& bench, const ClusterSize& size, std::vector<SpeedRow>& out) {
  SimulateOptions options;
  options.profile = bench.profile;
  options.workers = size.text();
  options.rate = size.rate();
  options.seconds = bench.seconds;
  options.policies = bench.policies;
  options.seed = bench.seed;
  Result<SimulateSetup> setup = SimulateSetup();
  const double setup_s = processor_s([&] { setup = set_up_simulation(options); });
  if (!setup) return std::move(setup).error();
  std::vector<SpeedRow> rows;
  for (int64_t round = 0; round < bench.rounds; ++round) {
    Result<std::vector<SimulateRun>> runs = simulate_all(options, *setup);
    if (!runs) return std::move(runs).error();
    for (size_t i = 0; i < runs->size(); ++i) {
      const SimulateRun& run = (*runs)[i];
      if (round == 0) {
        rows.push_back({.size = size,
                        .policy = run.policy,
                        .steps = run.result.steps_run,
                        .simulated_s = run.result.end_s,
                        .took_s = run.took_s,
                        .setup_s = setup_s,
                        .decode_batch = run.summary.decode_batch});
      }
      rows[i].took_s = std::min(rows[i].took_s, run.took_s);
    }
  }
  out.insert(out.end(), rows.begin(), rows.end());
  return {};
}

std::string speed_text(const std::vector<SpeedRow>& rows, const Machine& machine) {
  Table table({"cluster", "requests/s", "policy", "simulated s", "took s", "x real time", "steps", "us a step",
               "decode batch", "set-up s"});
  for (const SpeedRow& row : rows) {
    table.row({row.size.text(), fmt::format("{:.0f}", row.size.rate()), row.policy,
               fmt::format("{:.1f}", row.simulated_s), fmt::format("{:.2f}", row.took_s),
               fmt::format("{:.0f}", row.times_real()), fmt::to_string(row.steps),
               fmt::format("{:.2f}", row.us_per_step()), fmt::format("{:.1f}", row.decode_batch),
               fmt::format("{:.1f}", row.setup_s)});
  }
  return fmt::format(
      "{}\nProcessor time of one thread. Aim: {:.0f} x real time for 8P16D at 100 requests a second.\n{}\n",
      table.text(), kAimTimesRealTime, machine_text(machine));
}

Status draw_speed(const SimulateBench& bench, const std::vector<SpeedRow>& rows, const Machine& machine) {
  Chart chart{"Simulation: time against steps", "steps", "seconds of processor time", {}, machine_text(machine)};
  for (const std::string& policy : bench.policies) {
    Series series;
    series.name = policy;
    for (const SpeedRow& row : rows) {
      if (row.policy != policy) continue;
      series.x.push_back(static_cast<double>(row.steps));
      series.y.push_back(row.took_s);
    }
    chart.series.push_back(std::move(series));
  }
  chart.x_from_zero = chart.y_from_zero = true;
  return save_svg(bench.output.plots, "bench-simulate", line_chart(chart));
}

}  // namespace

int bench_simulate(Args args) {
  SimulateBench bench;
  ConfigSchema schema("bench simulate [OPTIONS]",
                      "How much faster than real time the simulator is, and how its time grows with the cluster.");
  schema.real("seconds", &bench.seconds, 1, 1e5, "for how long requests arrive");
  schema.text("profile", &bench.profile, "hardware profile");
  schema.list("policy", &bench.policies, "decode policies");
  schema.integer("rounds", &bench.rounds, 1, 1000, "of which the fastest counts");
  schema.integer("seed", &bench.seed, 0, 1LL << 40, "of requests");
  bench.output.declare(schema, /*draws=*/true);
  if (const auto status = parse_bench_flags(schema, args)) return *status;
  const Machine machine = this_machine();
  std::vector<SpeedRow> rows;
  for (const ClusterSize& size : kSizes) {
    if (Status measured = measure_size(bench, size, rows); !measured) return fail("bench simulate", measured.error());
  }
  if (bench.output.json) {
    Json json = {{"bench", "simulate"}, {"machine", machine_json(machine)}, {"aim", kAimTimesRealTime}};
    for (const SpeedRow& row : rows) {
      json["rows"].push_back({{"workers", row.size.text()},
                              {"rate", row.size.rate()},
                              {"policy", row.policy},
                              {"simulated_s", row.simulated_s},
                              {"took_s", row.took_s},
                              {"steps", row.steps},
                              {"decode_batch", row.decode_batch},
                              {"setup_s", row.setup_s}});
    }
    fmt::print("{}\n", dump_json(json, 2));
  } else {
    fmt::print("{}", speed_text(rows, machine));
  }
  if (bench.output.plots.empty()) return 0;
  if (Status drawn = draw_speed(bench, rows, machine); !drawn) return fail("bench simulate", drawn.error());
  return 0;
}

}  // namespace kindred::cli
