// `kindred place`: traffic in, a placement of experts out, what it is worth, and how to get there.

#include "cli/place.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <numeric>

#include "base/config.h"
#include "cli/bench.h"
#include "cli/commands.h"
#include "cli/terminal.h"
#include "place/json_numbers.h"
#include "place/placement_file.h"
#include "place/traffic_file.h"

namespace kindred::cli {
namespace {

constexpr std::array kBetas = {0.0, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.1, 1.0};
constexpr std::array kGammas = {0.0, 0.1, 1.0, 10.0};

void declare_problem(ConfigSchema& schema, PlaceArguments& options) {
  schema.text("input", &options.input, "traffic: .json, .csv, or recorded activations (.safetensors)");
  schema.integer("ranks", &options.ranks, 0, 4096, "that hold experts; 0: as the input says");
  schema.integer("sources", &options.sources, 0, 4096, "of recorded activations: 0: one per domain");
  schema.text("placement", &options.placement,
              "where experts are now: a placement file, linear, or none; else as the input says, or linear");
  schema.integer("redundant", &options.redundant, 0, 1 << 20, "slots a layer beyond one per expert");
  schema.text("distance", &options.distance,
              "JSON file: cost of a token [sources][ranks], or distances between ranks [ranks][ranks] as numactl "
              "prints them between nodes");
  schema.integer("ranks_per_node", &options.ranks_per_node, 0, 4096, "0: all on one node");
  schema.integer("nodes_per_rack", &options.nodes_per_rack, 0, 4096, "0: all in one rack");
  schema.real("node_cost", &options.node_cost, 0, 1e9, "of a token to another rank of its node");
  schema.real("rack_cost", &options.rack_cost, 0, 1e9, "to another node of its rack");
  schema.real("far_cost", &options.far_cost, 0, 1e9, "to another rack");
}

void declare_solver(ConfigSchema& schema, PlaceArguments& options) {
  std::vector<std::string> names;
  for (const place::Solver solver : place::kSolvers) names.emplace_back(place::to_string(solver));
  schema.choice("solver", &options.solver, std::move(names), "how to place");
  schema.flag("compare", &options.compare, "all other solvers beside it");
  schema.real("alpha", &options.weights.alpha, 0, 1e9, "weight of communication");
  schema.real("beta", &options.weights.beta, 0, 1e9, "weight of imbalance");
  schema.real("gamma", &options.weights.gamma, 0, 1e9, "weight of a move");
  schema.real("load_cap", &options.load_cap, 0, 1e9, "most load of a rank in a layer, times the mean; 0: none");
  schema.integer("groups", &options.groups, 1, 65'536, "of eplb: groups of experts");
  schema.integer("nodes", &options.nodes, 1, 4096, "of eplb: nodes that hold whole groups");
  schema.real("time_limit_s", &options.time_limit_s, 0.01, 1e6, "of exact, per layer");
  schema.flag("calibrate", &options.calibrate,
              "sweep greedy's beta and gamma against exact, and simulate what the best are worth");
  schema.text("profile", &options.profile, "calibrate: hardware profile of the simulation, of the traffic's model");
}

void declare_output(ConfigSchema& schema, PlaceArguments& options) {
  place::MigrationOptions& migration = options.migration;
  schema.real("expert_bytes", &migration.expert_bytes, 1, 1e15, "of one expert of one layer");
  schema.real("link_bytes_per_s", &migration.link_bytes_per_s, 1, 1e15, "of a rank, each way");
  schema.real("token_bytes", &migration.token_bytes, 0, 1e12, "a token's way to a remote expert and back");
  schema.real("busy_token_s", &migration.busy_token_s, 0, 1, "a token's time on the busiest rank");
  schema.integer("spare_experts", &options.spare_experts, 0, 65'536, "room of a rank while experts move");
  schema.integer("experts_per_batch", &options.experts_per_batch, 1, 65'536, "that a rank sends or gets at once");
  schema.real("windows", &migration.windows, 0.001, 1e9, "like this one that a migration may take to pay off");
  schema.real("margin", &migration.margin, 0, 1e9, "gain over cost, at least");
  schema.text("output", &options.output, "placement file to write");
  schema.text("vllm", &options.vllm, "file to write for vLLM: physical to logical experts");
  schema.text("sglang", &options.sglang, "file to write for SGLang's --init-expert-location");
  schema.integer("explain", &options.explain, 0, 100'000, "so many moves, and why");
  schema.text("plots", &options.plots, "folder for a heat map before and after");
  schema.flag("json", &options.json, "print the report as JSON, with the steps of the migration");
}

ConfigSchema place_schema(PlaceArguments& options) {
  ConfigSchema schema("place --input traffic.json --ranks 8 [--solver flow] [--output placement.json]",
                      "Places experts on the ranks of expert parallelism where their traffic comes from. "
                      "docs/placement.md describes files and solvers.");
  declare_problem(schema, options);
  declare_solver(schema, options);
  declare_output(schema, options);
  schema.accept_config_file();
  return schema;
}

// ------------------------------------------------------------------------------------------ the problem

Result<place::Topology> topology_of(const PlaceArguments& options, const place::TrafficFile& file, uint32_t ranks) {
  const uint32_t sources = file.traffic.sources;
  if (options.distance.empty()) {
    if (!file.distance.empty()) {
      return place::Topology{.sources = sources, .ranks = ranks, .distance = file.distance};
    }
    return place::tiered_topology(sources, ranks,
                                  {.ranks_per_node = static_cast<uint32_t>(options.ranks_per_node),
                                   .nodes_per_rack = static_cast<uint32_t>(options.nodes_per_rack),
                                   .same_node = options.node_cost,
                                   .same_rack = options.rack_cost,
                                   .far = options.far_cost});
  }
  const Result<std::string> text = read_file(options.distance);
  if (!text) return text.error();
  Result<place::NumberGrid> grid = place::read_numbers(parse_json(*text), 2, "distance");
  if (!grid) return std::move(grid).error();
  // A square matrix with a non-zero diagonal is one between ranks, as local memory is not free.
  const bool square = grid->shape[0] == ranks && grid->shape[1] == ranks;
  if (square && (sources != ranks || grid->values.front() != 0)) {
    return place::topology_from_rank_distances(sources, ranks, grid->values);
  }
  if (grid->shape[0] != sources || grid->shape[1] != ranks) {
    return invalid(fmt::format("{} x {}; accepted: {} x {} (sources x ranks) or {} x {}", grid->shape[0],
                               grid->shape[1], sources, ranks, ranks, ranks),
                   "distance");
  }
  return place::Topology{.sources = sources, .ranks = ranks, .distance = std::move(grid->values)};
}

Status read_old_placement(const PlaceArguments& options, const place::TrafficFile& file, PlaceResults& results) {
  place::Problem& problem = results.problem;
  if (options.placement == "none") return {};
  if (!options.placement.empty() && options.placement != "linear") {
    Result<place::Placement> old = place::load_placement(options.placement);
    if (!old) return std::move(old).error();
    problem.old = *std::move(old);
    return {};
  }
  if (options.placement.empty() && !file.slots.empty()) {
    Result<place::Placement> old = place::placement_from_slots(file.slots, problem.traffic.experts, problem.ranks());
    if (!old) return std::move(old).error();
    problem.old = *std::move(old);
    results.old_slots = file.slots;
    return {};
  }
  if (options.placement.empty() && !file.old.empty()) {
    problem.old = file.old;
    return {};
  }
  Result<place::Solution> linear = place::solve(problem, place::Solver::kLinear);
  if (!linear) return std::move(linear).error();
  problem.old = std::move(linear->placement);
  return {};
}

Status read_problem(const PlaceArguments& options, PlaceResults& results) {
  Result<place::TrafficFile> file =
      place::load_traffic(options.input, {.sources = static_cast<uint32_t>(options.sources)});
  if (!file) return std::move(file).error();
  const uint32_t ranks = options.ranks > 0 ? static_cast<uint32_t>(options.ranks) : file->ranks;
  if (ranks == 0) return invalid("--ranks is missing: how many ranks hold experts?", "ranks");
  Result<place::Topology> topology = topology_of(options, *file, ranks);
  if (!topology) return std::move(topology).error();
  place::Problem& problem = results.problem;
  problem.traffic = file->traffic;
  problem.topology = *std::move(topology);
  problem.redundant = static_cast<uint32_t>(options.redundant);
  if (options.redundant == 0 && !file->slots.empty()) {
    problem.redundant = static_cast<uint32_t>(file->slots.front().size()) - problem.traffic.experts;
  }
  problem.weights = options.weights;
  if (options.load_cap > 0) problem.load_cap = options.load_cap;
  problem.transitions = std::move(file->transitions);
  problem.groups = static_cast<uint32_t>(options.groups);
  problem.nodes = static_cast<uint32_t>(options.nodes);
  results.source_names = file->source_names;
  if (Status good = problem.check(); !good) return good;
  if (Status good = read_old_placement(options, *file, results); !good) return good;
  return problem.check();
}

// ------------------------------------------------------------------------------------------ the work

Result<PlaceRow> run_solver(const PlaceArguments& options, const place::Problem& problem, place::Solver solver) {
  PlaceRow row{.name = std::string(place::to_string(solver))};
  std::optional<Progress> progress;
  place::SolveOptions solve{.time_limit_s = options.time_limit_s};
  solve.on_layer = [&](size_t done) {
    if (!progress) progress.emplace("exact, layer by layer", problem.traffic.layers);
    progress->set(done);
  };
  std::optional<Result<place::Solution>> solution;
  row.time_s = seconds([&] { solution = place::solve(problem, solver, solve); });
  if (!*solution) return solution->error();
  row.solution = *std::move(*solution);
  row.layers = place::evaluate(problem, row.solution.placement);
  return row;
}

void simulate_calibration(const PlaceArguments& options, const place::Problem& problem, PlaceCalibration& into) {
  const auto simulate = [&](const place::Weights& weights, std::optional<PlaceSimulation>& out) {
    Result<PlaceSimulation> run = simulate_weights(problem, weights, options.profile, options.migration);
    if (run) out = *run;
    else into.not_simulated = run.error().message;
  };
  simulate(place::best_point(into.points).weights, into.simulated_best);
  if (into.simulated_best) simulate(into.uncalibrated.weights, into.simulated_uncalibrated);
}

// `exact` where it is there; else the proof that `flow` brings.
Status run_calibration(const PlaceArguments& options, PlaceResults& results) {
  const place::Problem& problem = results.problem;
  const place::Solver solver = place::has_exact() ? place::Solver::kExact : place::Solver::kFlow;
  Result<PlaceRow> reference = run_solver(options, problem, solver);
  if (!reference) return std::move(reference).error();
  PlaceCalibration calibration{.reference = reference->name, .reference_gap = reference->gap().value_or(0)};
  const place::Placement& placement = reference->solution.placement;
  Result<std::vector<place::CalibrationPoint>> points = place::calibrate_greedy(problem, placement, kBetas, kGammas);
  if (!points) return std::move(points).error();
  calibration.points = *std::move(points);
  const auto plain = std::find_if(calibration.points.begin(), calibration.points.end(), [](const auto& point) {
    return point.weights.beta == 1 && point.weights.gamma == 0;
  });
  KINDRED_CHECK(plain != calibration.points.end());
  calibration.uncalibrated = *plain;
  simulate_calibration(options, problem, calibration);
  results.calibration = std::move(calibration);
  return {};
}

Status compute_placement(const PlaceArguments& options, PlaceResults& results) {
  const Result<place::Solver> solver = place::parse_solver(options.solver);
  if (!solver) return solver.error();
  Result<PlaceRow> row = run_solver(options, results.problem, *solver);
  if (!row) return std::move(row).error();
  results.rows.push_back(*std::move(row));
  for (const place::Solver other : place::kSolvers) {
    if (!options.compare || other == *solver) continue;
    Result<PlaceRow> beside = run_solver(options, results.problem, other);
    if (beside) results.rows.push_back(*std::move(beside));
    else fmt::print(stderr, "{}: {}\n", place::to_string(other), beside.error().message);
  }
  const place::Placement& placement = results.rows.front().solution.placement;
  if (!results.problem.old.empty()) {
    place::MigrationOptions migration = options.migration;
    migration.spare_experts = static_cast<uint32_t>(options.spare_experts);
    migration.experts_per_batch = static_cast<uint32_t>(options.experts_per_batch);
    Result<place::MigrationPlan> plan = place::plan_migration(results.problem, placement, migration);
    if (!plan) return std::move(plan).error();
    results.migration = *std::move(plan);
    results.reasons = place::explain_moves(results.problem, placement, static_cast<size_t>(options.explain));
  }
  return options.calibrate ? run_calibration(options, results) : Status();
}

Status write_placements(const PlaceArguments& options, const PlaceResults& results) {
  const place::Placement& placement = results.rows.front().solution.placement;
  if (!options.output.empty()) {
    if (Status done = write_file(options.output, place::placement_to_text(placement)); !done) return done;
  }
  std::vector<std::vector<uint32_t>> before = results.old_slots;
  if (before.empty() && !results.problem.old.empty()) before = place::slots_of(results.problem.old);
  const std::vector<std::vector<uint32_t>> slots = place::slots_of(placement, before);
  if (!options.vllm.empty()) {
    if (Status done = write_file(options.vllm, place::vllm_map(slots)); !done) return done;
  }
  return options.sglang.empty() ? Status() : write_file(options.sglang, place::sglang_location(slots));
}

}  // namespace

std::optional<double> proven_gap(const place::Solution& solution, double objective) {
  if (solution.bound.empty()) return std::nullopt;
  const double bound = std::accumulate(solution.bound.begin(), solution.bound.end(), 0.0);
  return objective > 0 ? std::max(0.0, objective - bound) / objective : 0;
}

int run_place(Args args) {
  PlaceArguments options;
  ConfigSchema schema = place_schema(options);
  if (const Status parsed = schema.parse_flags(args); !parsed) return fail("place", parsed.error(), 2);
  if (schema.help_requested()) {
    fmt::print("{}", schema.help());
    return 0;
  }
  if (options.input.empty()) {
    return fail("place", invalid("which traffic? usage: kindred place --input FILE --ranks N"), 2);
  }
  PlaceResults results;
  if (const Status read = read_problem(options, results); !read) return fail("place", read.error());
  if (const Status done = compute_placement(options, results); !done) return fail("place", done.error());
  if (const Status written = write_placements(options, results); !written) return fail("place", written.error());
  if (!options.plots.empty()) {
    if (const Status drawn = write_place_plots(options, results); !drawn) return fail("place", drawn.error());
  }
  if (options.json) fmt::print("{}\n", dump_json(place_json(options, results), 2));
  else print_place(options, results);
  return 0;
}

}  // namespace kindred::cli
