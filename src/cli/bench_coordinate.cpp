// `kindred bench coordinate`: engines chosen by pressure and experts placed by their traffic, alone and together, on
// this machine's expert ranks.

#include "cli/bench_coordinate.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "cli/local_cluster.h"
#include "cli/openmp.h"
#include "cli/plot.h"
#include "cli/terminal.h"
#include "engine/widen.h"

namespace kindred::cli {
namespace {

std::string coordinate_table(const CoordinateRank& table) {
  Table out({"arm", "imbalance", "by dispatch", "remote", "pressure gap", "active/rank", "placements", "moves",
             "moved MB", "step ms", "CPU ms/step", "TTFT ms", "requests"});
  for (size_t i = 0; i < table.arms.size(); ++i) {
    const CoordinateFigures& f = table.arms[i];
    out.row({std::string(coordinate_arms()[i].name), fmt::format("{:.3f}", f.imbalance),
             fmt::format("{:.3f}", f.dispatch_imbalance), fmt::format("{:.1f} %", 100 * f.remote_share),
             fmt::format("{:.3f}", f.pressure_gap), fmt::format("{:.2f}", f.rank_active),
             fmt::format("{:.0f}", f.placements), fmt::format("{:.0f}", f.moves), fmt::format("{:.1f}", f.moved_mb),
             fmt::format("{:.2f}", f.step_ms), fmt::format("{:.2f}", f.step_cpu_ms), fmt::format("{:.0f}", f.ttft_ms),
             fmt::format("{:.0f}", f.requests)});
  }
  return out.text();
}

std::string link_text(const std::vector<NumaLink>& links) {
  if (links.empty()) {
    return "one NUMA node: all ranks read one memory and there is no slow link, so times show balance only, and the "
           "counters (remote) show what would cross one\n";
  }
  std::string out = "NUMA nodes, one thread reading in order:\n";
  for (const NumaLink& link : links) {
    out += fmt::format("  node {} reads node {}'s memory: {:.1f} GB/s\n", link.reader, link.memory,
                       link.bytes_per_s / 1e9);
  }
  return out;
}

std::string coordinate_text(const CoordinateBench& bench, const CoordinateResult& result) {
  std::string out = fmt::format(
      "{} engines of {} sequences in one process; {} layers of {} experts, top {}, {:.2f} MB each (widened x{}, {})\n"
      "{:.0f} % of requests are bound to the engine where their domain is at home: {}\n"
      "{:.0f} s after {:.0f} s to settle; experts are placed by windows of {} ms\n\n",
      bench.engines, bench.sequences, result.layers, result.experts, result.top_k, result.expert_mb, bench.factor,
      bench.type, 100 * bench.bound_share, fmt::join(result.homes, " | "), bench.seconds, bench.settle_s,
      bench.window_ms);
  for (const CoordinateRank& table : result.tables) {
    out += fmt::format("DP {} x {} expert ranks\n\n{}\n", bench.engines, table.ranks, coordinate_table(table));
  }
  return out + fmt::format(
                   "imbalance: largest over mean load of ranks, layer by layer, over the measured time; by dispatch: "
                   "of each layer of each step, where few tokens are never even\n"
                   "remote: share of tokens to experts on a rank that is not their engine's; pressure gap: largest "
                   "over mean load of engines' ranks\n"
                   "baseline: request-count, and EPLB every 4 windows; DP: pressure; EP: flow; feedback: the load of "
                   "its ranks counts in an engine's pressure\n{}"
                   "pace and machine decide how many requests a run gets through; compare ratios, not sums\n"
                   "with Gimbal's own rules on its test bed, by simulation: kindred reproduce gimbal\n",
                   link_text(result.links));
}

std::string simulation_text(const CoordinateBench& bench, const CoordinateSimulation& simulated) {
  Table out({"arm", "TTFT ms", "p99 ms", "TPOT ms", "imbalance", "remote", "placements", "stalled s"});
  for (size_t i = 0; i < simulated.arms.size(); ++i) {
    const reproduce::GimbalCell& f = simulated.arms[i];
    out.row({std::string(coordinate_arms()[i].name), fmt::format("{:.0f}", 1e3 * f.ttft_s),
             fmt::format("{:.0f}", 1e3 * f.ttft_p99_s), fmt::format("{:.2f}", 1e3 * f.tpot_s),
             fmt::format("{:.3f}", f.max_over_mean), fmt::format("{:.1f} %", 100 * f.remote_share),
             fmt::format("{:.0f}", f.migrations), fmt::format("{:.2f}", f.stalled_s)});
  }
  return fmt::format(
      "By simulation: DP 2, TP 2, EP 4 on H100s, Qwen3-30B-A3B, synthetic experts of 8 domains; {} requests, {:.0f} a "
      "second, {:.0f} % bound\n\n{}\n",
      simulated.requests, simulated.rate, 100 * bench.bound_share, out.text());
}

void add_simulation(const CoordinateSimulation& simulated, Json& out) {
  out["simulated"] = {{"requests", simulated.requests}, {"rate", simulated.rate}, {"rows", Json::array()}};
  for (size_t i = 0; i < simulated.arms.size(); ++i) {
    const reproduce::GimbalCell& f = simulated.arms[i];
    out["simulated"]["rows"].push_back({{"arm", coordinate_arms()[i].name},
                                        {"ttft_ms", 1e3 * f.ttft_s},
                                        {"ttft_p99_ms", 1e3 * f.ttft_p99_s},
                                        {"tpot_ms", 1e3 * f.tpot_s},
                                        {"imbalance", f.max_over_mean},
                                        {"remote_share", f.remote_share},
                                        {"placements", f.migrations},
                                        {"stalled_s", f.stalled_s}});
  }
}

Json coordinate_json(const CoordinateBench& bench, const CoordinateResult& result) {
  Json out = {{"bench", "coordinate"},        {"engines", bench.engines},      {"factor", bench.factor},
              {"type", bench.type},           {"expert_mb", result.expert_mb}, {"layers", result.layers},
              {"experts", result.experts},    {"top_k", result.top_k},         {"bound_share", bench.bound_share},
              {"homes", result.homes},        {"settle_s", bench.settle_s},    {"seconds", bench.seconds},
              {"window_ms", bench.window_ms}, {"way_us", bench.way_us},        {"seed", bench.seed},
              {"rows", Json::array()},        {"numa_links", Json::array()}};
  for (const CoordinateRank& table : result.tables) {
    for (size_t i = 0; i < table.arms.size(); ++i) {
      const CoordinateFigures& f = table.arms[i];
      out["rows"].push_back({{"ranks", table.ranks},
                             {"arm", coordinate_arms()[i].name},
                             {"imbalance", f.imbalance},
                             {"dispatch_imbalance", f.dispatch_imbalance},
                             {"remote_share", f.remote_share},
                             {"pressure_gap", f.pressure_gap},
                             {"rank_active_experts", f.rank_active},
                             {"placements", f.placements},
                             {"moves", f.moves},
                             {"moved_mb", f.moved_mb},
                             {"step_ms", f.step_ms},
                             {"step_cpu_ms", f.step_cpu_ms},
                             {"ttft_ms", f.ttft_ms},
                             {"requests", f.requests}});
    }
  }
  for (const NumaLink& link : result.links) {
    out["numa_links"].push_back({{"reader", link.reader}, {"memory", link.memory}, {"bytes_per_s", link.bytes_per_s}});
  }
  return out;
}

Status draw_coordinate(const CoordinateResult& result, const std::string& folder, const std::string& note) {
  const auto draw = [&](std::string_view name, std::string title, std::string label,
                        double CoordinateFigures::*figure) {
    BarChart chart{.title = std::move(title),
                   .y_label = std::move(label),
                   .categories = {},
                   .groups = {},
                   .values = {},
                   .note = note};
    for (const CoordinateArm& arm : coordinate_arms()) chart.categories.emplace_back(arm.name);
    for (const CoordinateRank& table : result.tables) {
      chart.groups.push_back(fmt::format("{} ranks", table.ranks));
      std::vector<double>& values = chart.values.emplace_back();
      for (const CoordinateFigures& f : table.arms) values.push_back(f.*figure);
    }
    return save_svg(folder, name, bar_chart(chart));
  };
  if (Status done = draw("coordinate-remote", "Tokens to experts on another engine's rank", "share",
                         &CoordinateFigures::remote_share);
      !done) {
    return done;
  }
  return draw("coordinate-imbalance", "Largest over mean load of expert ranks, layer by layer", "imbalance",
              &CoordinateFigures::imbalance);
}

}  // namespace

int bench_coordinate(Args args) {
  CoordinateBench bench;
  ConfigSchema schema("bench coordinate [OPTIONS]",
                      "Engines chosen by pressure, experts placed where their traffic comes from, or both, on expert "
                      "ranks of this machine.");
  schema.flag("quick", &bench.quick, "two ranks, short runs");
  schema.list("ranks", &bench.ranks, "expert ranks; default: 2 and 4");
  schema.integer("engines", &bench.engines, 2, 16, "data-parallel engines over the same weights, one thread each");
  schema.text("model", &bench.model, "GGUF file of an MoE model; default: the bundled one");
  schema.integer("factor", &bench.factor, 1, 64, "widen its experts, into a temporary file");
  schema.choice("type", &bench.type, engine::widened_types(), "type of the widened experts' weights");
  schema.text("prompts", &bench.prompts, "prompt file, with domains; default: data/prompts/bench_task.jsonl");
  schema.real("bound_share", &bench.bound_share, 0, 1, "of requests that only the engine of their domain may take");
  schema.integer("sequences", &bench.sequences, 1, 64, "of an engine at once");
  schema.integer("token_budget", &bench.token_budget, 16, 4096, "tokens a step");
  schema.integer("longest_prompt", &bench.longest_prompt, 32, 4096,
                 "tokens; pressure's constants in tokens are scaled with it");
  schema.integer("output_tokens", &bench.output_tokens, 1, 4096, "of each request");
  schema.integer("window_ms", &bench.window_ms, 10, 60'000, "of the experts' traffic");
  schema.real("way_us", &bench.way_us, 0, 1e6,
              "what a token's way to a remote expert costs, for placing; 0: what the worker counts for one memory");
  schema.real("settle_s", &bench.settle_s, 0.1, 3600, "before an arm is measured: experts find their places");
  schema.real("seconds", &bench.seconds, 0.1, 3600, "that an arm is measured for");
  schema.integer("seed", &bench.seed, 0, 1LL << 40, "of requests");
  bench.output.declare(schema, /*draws=*/true);
  if (const auto status = parse_bench_flags(schema, args)) return *status;
  if (bench.quick) {
    bench.window_ms = std::min<int64_t>(bench.window_ms, 100);
    bench.settle_s = std::min(bench.settle_s, 1.0);
    bench.seconds = std::min(bench.seconds, 2.0);
    bench.factor = std::min<int64_t>(bench.factor, 2);
  }
  if (bench.model.empty()) bench.model = find_root() + "/models/kindred-tiny-moe-q8_0.gguf";
  if (bench.prompts.empty()) bench.prompts = find_root() + "/data/prompts/bench_task.jsonl";
  make_openmp_wait_passively();
  const Machine machine = this_machine();
  const Result<CoordinateResult> result = run_coordinate(bench);
  if (!result) return fail("bench coordinate", result.error(), result.error().code == ErrorCode::kInvalid ? 2 : 1);
  const Result<CoordinateSimulation> simulated = simulate_coordinate(bench);
  if (!simulated) return fail("bench coordinate", simulated.error());
  if (bench.output.json) {
    Json json = coordinate_json(bench, *result);
    add_simulation(*simulated, json);
    json["machine"] = machine_json(machine);
    fmt::print("{}\n", dump_json(json, 2));
  } else {
    fmt::print("{}\n{}{}\n", coordinate_text(bench, *result), simulation_text(bench, *simulated),
               machine_text(machine));
  }
  if (bench.output.plots.empty()) return 0;
  const std::string note =
      fmt::format("measured on {} cores, {} engines; one run an arm", machine.cores, bench.engines);
  if (Status drawn = draw_coordinate(*result, bench.output.plots, note); !drawn) {
    return fail("bench coordinate", drawn.error());
  }
  return 0;
}

}  // namespace kindred::cli
