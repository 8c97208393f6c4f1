// `kindred bench place`: all solvers on generated traffic of a model's size, and on problems with known optima.

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "base/config.h"
#include "base/rng.h"
#include "cli/bench.h"
#include "cli/place.h"
#include "cli/terminal.h"
#include "place/generate.h"
#include "place/traffic_file.h"

namespace kindred::cli {
namespace {

struct PlaceBenchOptions {
  int64_t layers = 48, experts = 128, ranks = 8, sources = 4, runs = 7, seed = 1, exact_layers = 1;
  double time_limit_s = 20;
  std::string golden = "tests/data/golden";
  BenchOutput output;
};

constexpr std::array kBenchKinds = {place::TrafficKind::kAffinity, place::TrafficKind::kWeakAffinity,
                                    place::TrafficKind::kZipf};

place::Problem bench_problem(const PlaceBenchOptions& options, place::TrafficKind kind, int64_t sources,
                             int64_t layers) {
  return place::generate_problem(kind,
                                 {.layers = static_cast<uint32_t>(layers),
                                  .sources = static_cast<uint32_t>(sources),
                                  .experts = static_cast<uint32_t>(options.experts)},
                                 static_cast<uint32_t>(options.ranks), static_cast<uint64_t>(options.seed));
}

struct TimedSolution {
  place::Solution solution;
  std::vector<double> times_s;
};

// By processor time: all solvers run on one thread, and the machine may do other things too.
Result<TimedSolution> timed(const place::Problem& problem, place::Solver solver, int64_t runs, double time_limit_s) {
  TimedSolution out;
  for (int64_t run = 0; run < runs; ++run) {
    const double began_s = time_now_s(TimeBy::kProcessor);
    Result<place::Solution> solution = place::solve(problem, solver, {.time_limit_s = time_limit_s});
    out.times_s.push_back(time_now_s(TimeBy::kProcessor) - began_s);
    if (!solution) return std::move(solution).error();
    out.solution = *std::move(solution);
  }
  return out;
}

// One kind of traffic: all layers for all but exact; then a few layers with exact too.
Status bench_kind(const PlaceBenchOptions& options, place::TrafficKind kind, std::string& text, Json& json) {
  for (const bool with_exact : {false, true}) {
    const int64_t layers = with_exact ? std::min(options.exact_layers, options.layers) : options.layers;
    if (layers == 0 || (with_exact && !place::has_exact())) continue;
    const place::Problem problem = bench_problem(options, kind, options.sources, layers);
    Table table(place_table_header());
    table.row(place_table_row("as it is", place::total(place::evaluate(problem, problem.old)), {}, {}));
    for (const place::Solver solver : place::kSolvers) {
      const bool exact = solver == place::Solver::kExact;
      if (exact && !with_exact) continue;
      const Result<TimedSolution> result = timed(problem, solver, exact ? 1 : options.runs, options.time_limit_s);
      if (!result) return result.error();
      const place::Cost cost = place::total(place::evaluate(problem, result->solution.placement));
      const double median_s = quantile(result->times_s, 0.5);
      table.row(place_table_row(std::string(place::to_string(solver)), cost,
                                proven_gap(result->solution, cost.objective), median_s));
      json.push_back({{"traffic", place::to_string(kind)},
                      {"layers", layers},
                      {"solver", place::to_string(solver)},
                      {"objective", cost.objective},
                      {"remote_share", cost.remote_share()},
                      {"max_over_mean_load", cost.max_over_mean()},
                      {"moves", cost.moves},
                      {"median_ms", 1e3 * median_s}});
    }
    text += fmt::format("{} x {} experts on {} ranks, {} sources, {}; median of {}\n{}\n", layers, options.experts,
                        options.ranks, options.sources, place::to_string(kind), options.runs, table.text());
  }
  return {};
}

// flow from linear, and from its own placement of the window before.
Status bench_flow(const PlaceBenchOptions& options, std::string& text, Json& json) {
  Table table({"flow, zipf", "cold: median ms", "most", "warm: median ms", "most", "moves when warm"});
  for (const int64_t sources : {int64_t{2}, int64_t{4}, int64_t{8}}) {
    place::Problem problem = bench_problem(options, place::TrafficKind::kZipf, sources, options.layers);
    const Result<TimedSolution> cold = timed(problem, place::Solver::kFlow, options.runs, 1);
    if (!cold) return cold.error();
    problem.old = cold->solution.placement;
    problem.traffic = place::drifted(problem.traffic, 0.2, static_cast<uint64_t>(options.seed));
    const Result<TimedSolution> warm = timed(problem, place::Solver::kFlow, options.runs, 1);
    if (!warm) return warm.error();
    const place::Cost cost = place::total(place::evaluate(problem, warm->solution.placement));
    const auto ms = [](const std::vector<double>& times, double at) { return 1e3 * quantile(times, at); };
    table.row({fmt::format("{} sources", sources), fmt::format("{:.2f}", ms(cold->times_s, 0.5)),
               fmt::format("{:.2f}", ms(cold->times_s, 1)), fmt::format("{:.2f}", ms(warm->times_s, 0.5)),
               fmt::format("{:.2f}", ms(warm->times_s, 1)), fmt::format("{:.0f}", cost.moves)});
    json.push_back({{"sources", sources},
                    {"cold_median_ms", ms(cold->times_s, 0.5)},
                    {"cold_most_ms", ms(cold->times_s, 1)},
                    {"warm_median_ms", ms(warm->times_s, 0.5)},
                    {"warm_most_ms", ms(warm->times_s, 1)}});
  }
  text += table.text() + "\n";
  return {};
}

// ---------------------------------------------------------------------------------------- known optima

struct KnownProblem {
  std::string name;
  place::Problem problem = {};
  double optimum = 0;
};

Result<KnownProblem> known_problem(const std::filesystem::path& path) {
  Result<std::string> text = read_file(path.string());
  if (!text) return std::move(text).error();
  const Json golden = parse_json(*text);
  const Error bad = invalid(path.string() + ": not of the form that tests/data/golden/README.md describes", "golden");
  if (!golden.is_object() || !golden.contains("A") || !golden.contains("optimal_total")) return bad;
  // The rows of A are (layer, source).
  const auto number = [&](const char* field) -> uint32_t {
    return golden.contains(field) && golden[field].is_number_unsigned() ? golden[field].get<uint32_t>() : 0;
  };
  KnownProblem known{.name = path.stem().string().substr(std::string_view("placement_milp_").size())};
  known.problem.traffic = {.layers = number("L"), .sources = number("S"), .experts = number("E")};
  for (const Json& row : golden["A"]) {
    for (const Json& tokens : row)
      known.problem.traffic.tokens.push_back(tokens.is_number() ? tokens.get<double>() : -1);
  }
  Result<place::Topology> topology = place::tiered_topology(number("S"), number("R"));
  if (!topology) return bad;
  known.problem.topology = *std::move(topology);
  known.problem.old = {.layers = number("L"), .experts = number("E"), .ranks = number("R")};
  for (const Json& row : golden.value("old_rank", Json::array())) {
    for (const Json& rank : row) {
      known.problem.old.rank.push_back(rank.is_number_unsigned() ? rank.get<uint32_t>() : UINT32_MAX);
    }
  }
  known.optimum = golden["optimal_total"].is_number() ? golden["optimal_total"].get<double>() : 0;
  if (!known.problem.check().ok() || known.optimum <= 0) return bad;
  return known;
}

Status bench_goldens(const PlaceBenchOptions& options, std::string& text, Json& json) {
  std::vector<std::filesystem::path> paths;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(options.golden, error)) {
    if (entry.path().filename().string().starts_with("placement_milp_")) paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  if (paths.empty()) {
    text += fmt::format("no placement_milp_* in {}: no known optima\n", options.golden);
    return {};
  }
  std::vector<std::string> header = {"above the optimum", "optimum"};
  for (const place::Solver solver : place::kSolvers) {
    if (solver != place::Solver::kExact || place::has_exact()) header.emplace_back(place::to_string(solver));
  }
  header.emplace_back("exact ms");
  header.emplace_back("flow ms");
  Table table(header);
  for (const std::filesystem::path& path : paths) {
    const Result<KnownProblem> known = known_problem(path);
    if (!known) return known.error();
    std::vector<std::string> row = {known->name, fmt::format("{:.2f}", known->optimum)};
    std::string exact_ms, flow_ms;
    for (const place::Solver solver : place::kSolvers) {
      const bool exact = solver == place::Solver::kExact;
      if (exact && !place::has_exact()) continue;
      const Result<TimedSolution> result =
          timed(known->problem, solver, exact ? 1 : options.runs, options.time_limit_s);
      if (!result) return result.error();
      const double objective = place::total(place::evaluate(known->problem, result->solution.placement)).objective;
      const double above = objective / known->optimum - 1, median_ms = 1e3 * quantile(result->times_s, 0.5);
      row.push_back(fmt::format("{:.4f} %", 100 * above + 0.0));
      if (exact) exact_ms = fmt::format("{:.0f}", median_ms);
      if (solver == place::Solver::kFlow) flow_ms = fmt::format("{:.2f}", median_ms);
      json.push_back({{"golden", known->name},
                      {"solver", place::to_string(solver)},
                      {"above_optimum", above},
                      {"median_ms", median_ms}});
    }
    row.push_back(exact_ms);
    row.push_back(flow_ms);
    table.row(std::move(row));
  }
  text += table.text() + "\n";
  return {};
}

}  // namespace

int bench_place(Args args) {
  PlaceBenchOptions options;
  ConfigSchema schema("bench place [--layers 48] [--experts 128] [--ranks 8]",
                      "Places experts of generated traffic with every solver, and with exact where that is feasible; "
                      "times flow cold and warm; compares all with known optima.");
  schema.integer("layers", &options.layers, 1, 1024, "of the model");
  schema.integer("experts", &options.experts, 1, 4096, "of a layer");
  schema.integer("ranks", &options.ranks, 1, 4096, "that hold them; they divide experts");
  schema.integer("sources", &options.sources, 1, 4096, "of traffic");
  schema.integer("exact_layers", &options.exact_layers, 0, 1024, "for which exact is run too");
  schema.real("time_limit_s", &options.time_limit_s, 0.01, 1e6, "of exact, per layer");
  schema.integer("runs", &options.runs, 1, 1000, "the median of so many");
  schema.integer("seed", &options.seed, 0, 1LL << 40, "of the traffic");
  schema.text("golden", &options.golden, "folder with placement_milp_*.json");
  options.output.declare(schema, /*draws=*/false);
  if (const auto status = parse_bench_flags(schema, args)) return *status;
  if (options.experts % options.ranks != 0) {
    return fail("bench", invalid(fmt::format("{} ranks do not divide {} experts", options.ranks, options.experts)), 2);
  }
  const Machine machine = this_machine();
  Json json = {{"bench", "place"},
               {"machine", machine_json(machine)},
               {"solvers", Json::array()},
               {"flow", Json::array()},
               {"goldens", Json::array()}};
  std::string text;
  Status done = bench_flow(options, text, json["flow"]);
  for (const place::TrafficKind kind : kBenchKinds) {
    if (done.ok()) done = bench_kind(options, kind, text, json["solvers"]);
  }
  if (done.ok()) done = bench_goldens(options, text, json["goldens"]);
  if (!done) return fail("bench", done.error());
  fmt::print("{}\n",
             options.output.json ? dump_json(json) : text + "  processor time, one thread; " + machine_text(machine));
  return 0;
}

}  // namespace kindred::cli
