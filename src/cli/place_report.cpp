// What `kindred place` prints and draws.

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "cli/place.h"
#include "cli/plot.h"
#include "cli/terminal.h"

namespace kindred::cli {
namespace {

std::string weights_text(const place::Weights& weights) {
  return fmt::format("({:g}, {:g}, {:g})", weights.alpha, weights.beta, weights.gamma);
}

Json cost_json(const place::Cost& cost) {
  return {{"objective", cost.objective},
          {"communication", cost.communication},
          {"remote_tokens", cost.remote_tokens},
          {"tokens", cost.tokens},
          {"imbalance", cost.imbalance},
          {"max_over_mean_load", cost.max_over_mean()},
          {"moves", cost.moves}};
}

Json point_json(const place::CalibrationPoint& point) {
  return {{"beta", point.weights.beta},
          {"gamma", point.weights.gamma},
          {"kept", point.kept},
          {"kept_source", point.kept_source},
          {"communication_gap", point.communication_gap},
          {"cost", cost_json(point.cost)}};
}

void print_migration(const place::MigrationPlan& plan) {
  std::array<size_t, 4> counts = {};
  for (const place::MigrationStep& step : plan.steps) ++counts[static_cast<size_t>(step.kind)];
  fmt::print("\nmigration: {} moves, {} copies, {} drops, {} swaps in {} batches; {:.2f} GB, {:.3g} s\n", counts[0],
             counts[1], counts[2], counts[3], plan.batches, plan.bytes / 1e9, plan.cost_s);
  fmt::print("  {}: {}\n", plan.pays ? "pays" : "not worth it", plan.reason);
}

void print_calibration(const PlaceCalibration& calibration) {
  fmt::print("\ngreedy against {} (proven to {:.3f} %), alpha 1:\n\n", calibration.reference,
             100 * calibration.reference_gap);
  Table table({"beta", "gamma", "same rank", "same source", "communication", "max/mean", "moves", "objective"});
  for (const place::CalibrationPoint& point : calibration.points) {
    table.row({fmt::format("{:g}", point.weights.beta), fmt::format("{:g}", point.weights.gamma),
               fmt::format("{:.1f} %", 100 * point.kept), fmt::format("{:.1f} %", 100 * point.kept_source),
               fmt::format("{:+.2f} %", 100 * point.communication_gap),
               fmt::format("{:.3f}", point.cost.max_over_mean()), fmt::format("{:.0f}", point.cost.moves),
               fmt::format("{:.2f}", point.cost.objective)});
  }
  fmt::print("{}", table.text());
  const place::CalibrationPoint& best = place::best_point(calibration.points);
  const place::CalibrationPoint& plain = calibration.uncalibrated;
  fmt::print("\n  best {}: {:.1f} % of decisions kept, {:+.2f} % communication (Gimbal: over 80 %, 0.6 %)\n",
             weights_text(best.weights), 100 * best.kept, 100 * best.communication_gap);
  fmt::print(
      "  against (1, 1, 0): {:+.1f} % communication, max/mean load {:.3f} instead of {:.3f}, {:.0f} moves "
      "instead of {:.0f}\n",
      plain.cost.communication > 0 ? 100 * (best.cost.communication / plain.cost.communication - 1) : 0,
      best.cost.max_over_mean(), plain.cost.max_over_mean(), best.cost.moves, plain.cost.moves);
  if (!calibration.simulated_uncalibrated) {
    fmt::print("  not simulated: {}\n", calibration.not_simulated);
    return;
  }
  const PlaceSimulation& now = *calibration.simulated_best;
  const PlaceSimulation& before = *calibration.simulated_uncalibrated;
  fmt::print(
      "  simulated against (1, 1, 0): TTFT {:.1f} ms instead of {:.1f} ({:+.1f} %), TPOT {:.2f} ms instead of {:.2f} "
      "({:+.1f} %); remote {:.1f} % instead of {:.1f} %, max/mean {:.2f} instead of {:.2f}, {} experts moved instead "
      "of "
      "{} (Gimbal: TTFT -10.8 %, TPOT -9.2 %)\n",
      1e3 * now.ttft_s, 1e3 * before.ttft_s, 100 * (now.ttft_s / before.ttft_s - 1), 1e3 * now.tpot_s,
      1e3 * before.tpot_s, 100 * (now.tpot_s / before.tpot_s - 1), 100 * now.remote_share, 100 * before.remote_share,
      now.max_over_mean, before.max_over_mean, now.moved_experts, before.moved_experts);
}

Json simulation_json(const PlaceSimulation& run) {
  return {{"ttft_s", run.ttft_s},
          {"tpot_s", run.tpot_s},
          {"remote_share", run.remote_share},
          {"max_over_mean", run.max_over_mean},
          {"moved_experts", run.moved_experts},
          {"stalled_s", run.stalled_s}};
}

// Loads over the mean, before and after side by side, on one scale.
HeatMap load_map(const PlaceResults& results) {
  const place::Problem& problem = results.problem;
  const size_t ranks = problem.ranks();
  const std::vector<double> after = place::rank_loads(problem, results.rows.front().solution.placement);
  std::vector<double> before;
  if (!problem.old.empty()) before = place::rank_loads(problem, problem.old);
  HeatMap map{.title = "Load of ranks over the mean of the layer",
              .x_label = before.empty() ? "rank" : "rank, before | after",
              .y_label = "layer",
              .rows = {},
              .values = {}};
  double most_before = 0, most_after = 0;
  for (size_t l = 0; l < problem.traffic.layers; ++l) {
    map.rows.push_back(fmt::format("{}", l));
    std::vector<double>& row = map.values.emplace_back();
    double mean = 0;
    for (size_t r = 0; r < ranks; ++r) mean += after[l * ranks + r] / static_cast<double>(ranks);
    const auto add = [&](const std::vector<double>& loads, double& most) {
      for (size_t r = 0; r < ranks; ++r) {
        row.push_back(mean > 0 ? loads[l * ranks + r] / mean : 0);
        most = std::max(most, row.back());
      }
    };
    if (!before.empty()) {
      add(before, most_before);
      row.push_back(0);  // a gap
    }
    add(after, most_after);
  }
  map.note = before.empty() ? fmt::format("at most {:.2f}", most_after)
                            : fmt::format("at most {:.2f} before, {:.2f} after", most_before, most_after);
  return map;
}

// The share of each source's tokens that leave it, layer by layer.
HeatMap remote_map(const PlaceResults& results) {
  const place::Problem& problem = results.problem;
  HeatMap map{.title = "Share of a source's tokens that go to remote ranks",
              .x_label = problem.old.empty() ? "source" : "source, before | after",
              .y_label = "layer",
              .rows = {},
              .values = {}};
  place::Problem one = problem;  // with the traffic of one source at a time
  const auto share = [&](const place::Placement& placement, uint32_t source, std::vector<std::vector<double>>& out) {
    for (size_t i = 0; i < one.traffic.tokens.size(); ++i) {
      const bool own = i / problem.traffic.experts % problem.traffic.sources == source;
      one.traffic.tokens[i] = own ? problem.traffic.tokens[i] : 0;
    }
    const std::vector<place::Cost> costs = place::evaluate(one, placement);
    for (size_t l = 0; l < costs.size(); ++l) out[l].push_back(costs[l].remote_share());
  };
  map.values.resize(problem.traffic.layers);
  for (size_t l = 0; l < problem.traffic.layers; ++l) map.rows.push_back(fmt::format("{}", l));
  if (!problem.old.empty()) {
    for (uint32_t s = 0; s < problem.traffic.sources; ++s) share(problem.old, s, map.values);
    for (std::vector<double>& row : map.values) row.push_back(0);  // a gap
  }
  for (uint32_t s = 0; s < problem.traffic.sources; ++s) {
    share(results.rows.front().solution.placement, s, map.values);
  }
  return map;
}

}  // namespace

std::vector<std::string> place_table_header() {
  return {"solver", "objective", "off by at most", "remote tokens", "share", "max/mean load", "moves", "ms"};
}

std::vector<std::string> place_table_row(const std::string& name, const place::Cost& cost, std::optional<double> gap,
                                         std::optional<double> time_s) {
  return {name,
          fmt::format("{:.2f}", cost.objective),
          gap ? fmt::format("{:.3f} %", 100 * *gap) : "",
          fmt::format("{:.0f}", cost.remote_tokens),
          fmt::format("{:.1f} %", 100 * cost.remote_share()),
          fmt::format("{:.3f}", cost.max_over_mean()),
          fmt::format("{:.0f}", cost.moves),
          time_s ? fmt::format("{:.2f}", 1e3 * *time_s) : ""};
}

void print_place(const PlaceArguments& options, const PlaceResults& results) {
  const place::Problem& problem = results.problem;
  fmt::print("{} layers, {} experts, {} sources, {} ranks of {} slots; weights {}\n\n", problem.traffic.layers,
             problem.traffic.experts, problem.traffic.sources, problem.ranks(), problem.slots(),
             weights_text(problem.weights));
  Table table(place_table_header());
  if (!problem.old.empty()) {
    table.row(place_table_row("as it is", place::total(place::evaluate(problem, problem.old)), {}, {}));
  }
  for (const PlaceRow& row : results.rows) table.row(place_table_row(row.name, row.cost(), row.gap(), row.time_s));
  fmt::print("{}", table.text());
  if (results.migration) print_migration(*results.migration);
  if (!results.reasons.empty()) fmt::print("\n");
  for (const place::MoveReason& reason : results.reasons) {
    const std::string name = results.source_names.empty() ? std::string() : results.source_names[reason.main_source];
    fmt::print("  {}\n", place::to_sentence(reason, name));
  }
  if (results.calibration) print_calibration(*results.calibration);
  if (!options.output.empty()) fmt::print("\nwrote {}\n", options.output);
}

Json place_json(const PlaceArguments& options, const PlaceResults& results) {
  const place::Problem& problem = results.problem;
  Json json = {
      {"layers", problem.traffic.layers}, {"experts", problem.traffic.experts}, {"sources", problem.traffic.sources},
      {"ranks", problem.ranks()},         {"slots", problem.slots()},           {"output", options.output},
      {"alpha", problem.weights.alpha},   {"beta", problem.weights.beta},       {"gamma", problem.weights.gamma}};
  if (!problem.old.empty()) json["before"] = cost_json(place::total(place::evaluate(problem, problem.old)));
  for (const PlaceRow& row : results.rows) {
    Json entry = cost_json(row.cost());
    entry["solver"] = row.name;
    entry["time_ms"] = 1e3 * row.time_s;
    if (const auto gap = row.gap()) entry["gap"] = *gap;
    for (const place::Cost& layer : row.layers) entry["per_layer"].push_back(cost_json(layer));
    json["results"].push_back(std::move(entry));
  }
  if (results.migration) {
    const place::MigrationPlan& plan = *results.migration;
    json["migration"] = {{"batches", plan.batches}, {"bytes", plan.bytes}, {"cost_s", plan.cost_s},
                         {"gain_s", plan.gain_s},   {"pays", plan.pays},   {"reason", plan.reason},
                         {"steps", Json::array()}};
    for (const place::MigrationStep& step : plan.steps) {
      Json entry = {{"kind", place::to_string(step.kind)},
                    {"batch", step.batch},
                    {"layer", step.layer},
                    {"expert", step.expert},
                    {"from", step.from}};
      if (step.kind != place::StepKind::kDrop) entry["to"] = step.to;
      if (step.kind == place::StepKind::kSwap) entry["other"] = step.other;
      json["migration"]["steps"].push_back(std::move(entry));
    }
  }
  for (const place::MoveReason& reason : results.reasons) {
    json["explain"].push_back(place::to_sentence(
        reason, results.source_names.empty() ? std::string() : results.source_names[reason.main_source]));
  }
  if (results.calibration) {
    Json& calibration = json["calibration"];
    calibration["reference"] = results.calibration->reference;
    calibration["reference_gap"] = results.calibration->reference_gap;
    calibration["best"] = point_json(place::best_point(results.calibration->points));
    calibration["uncalibrated"] = point_json(results.calibration->uncalibrated);
    for (const auto& point : results.calibration->points) calibration["points"].push_back(point_json(point));
    if (results.calibration->simulated_uncalibrated) {
      calibration["simulated"] = {{"best", simulation_json(*results.calibration->simulated_best)},
                                  {"uncalibrated", simulation_json(*results.calibration->simulated_uncalibrated)}};
    } else {
      calibration["not_simulated"] = results.calibration->not_simulated;
    }
  }
  return json;
}

Status write_place_plots(const PlaceArguments& options, const PlaceResults& results) {
  if (Status saved = save_svg(options.plots, "place-load", heat_map(load_map(results))); !saved) return saved;
  return save_svg(options.plots, "place-remote", heat_map(remote_map(results)));
}

}  // namespace kindred::cli
