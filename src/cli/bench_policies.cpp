// `kindred bench policies`: the study that chooses the default decode policy (sim/policy_study.h), on the recorded
// routing that ships with Kindred, on the bundled model's own records, and on the calibrated synthetic process. One
// command; docs/choosing-a-policy.md is written from it.

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <mutex>
#include <thread>
#include <vector>

#include "cli/bench.h"
#include "cli/local_cluster.h"
#include "cli/plot.h"
#include "cli/simulate.h"
#include "cli/terminal.h"
#include "expert/activations.h"
#include "sim/policy_study.h"

namespace kindred::cli {
namespace {

struct PoliciesBench {
  bool quick = false, variants = false;
  int64_t seeds = 2, threads = 0;
  std::string only, routing;
  BenchOutput output;
};

struct StudyTask {
  size_t pool = 0;
  sim::StudyCell cell;
  std::string chart;  // of the cells that make one: "batch", "workers"; or empty
  Result<std::vector<sim::StudyRow>> rows = std::vector<sim::StudyRow>();
};

// gpt-oss-20b's decisions token by token: prompts were not recorded, so the first 64 tokens stand for them.
Result<sim::StudyPool> recorded_pool(const std::string& folder) {
  Result<sim::Profile> profile = find_profile("h200-gpt-oss-20b");
  if (!profile) return std::move(profile).error();
  auto process = sim::load_token_decisions(folder, {.prompt_tokens = 64}, 1);
  if (!process) return std::move(process).error();
  return sim::make_study_pool("gpt-oss-20b, recorded", **process, *std::move(profile));
}

// Twelve layers of 48 stand for all, or the tapes would not fit into a laptop.
Result<sim::StudyPool> synthetic_pool() {
  constexpr uint32_t kLayers = 12, kKinds = 16, kPrototypes = 24;
  Result<sim::Profile> profile = find_profile("h200-qwen3-30b-a3b");
  if (!profile) return std::move(profile).error();
  expert::ExpertShape shape{.layers = {}, .experts = profile->dims.experts, .top_k = profile->dims.top_k};
  for (uint32_t l = 0; l < kLayers; ++l) shape.layers.push_back(l * profile->dims.moe_layers / kLayers);
  sim::SyntheticOptions options = sim::calibrated_synthetic(shape);
  options.domains.clear();
  for (uint32_t d = 0; d < kKinds; ++d) options.domains.push_back(fmt::format("kind-{}", d));
  options.prototypes = kPrototypes;
  auto process = sim::make_synthetic(options);
  if (!process) return std::move(process).error();
  return sim::make_study_pool("Qwen3-30B-A3B, synthetic", **process, *std::move(profile));
}

// The bundled model's experts under a large model's step times: its own are those of a CPU.
Result<sim::StudyPool> bundled_pool() {
  Result<sim::Profile> profile = find_profile("h200-qwen3-30b-a3b");
  if (!profile) return std::move(profile).error();
  const auto path = std::filesystem::path(find_root()) / "models" / "kindred-tiny-moe.activations.safetensors";
  const Result<expert::Activations> activations = expert::load_activations(path.string());
  if (!activations) return activations.error();
  auto process = sim::make_recorded(*activations, 1);
  if (!process) return std::move(process).error();
  profile->dims.experts = activations->shape.experts;
  profile->dims.top_k = activations->shape.top_k;
  return sim::make_study_pool("bundled model, recorded", **process, *std::move(profile));
}

std::vector<StudyTask> study_tasks(bool quick) {
  constexpr size_t kRecorded = 0, kSynthetic = 1, kBundled = 2;
  std::vector<StudyTask> out;
  const auto add = [&](size_t pool, sim::StudyCell cell, std::string chart = {}) {
    out.push_back({.pool = pool, .cell = cell, .chart = std::move(chart)});
  };
  const auto skewed = [](uint32_t workers, double batch) {
    return sim::StudyCell{.workers = workers, .batch = batch, .mix = sim::StudyMix::kSkewed};
  };
  if (quick) {
    for (const double batch : {4.0, 16.0}) add(kRecorded, skewed(8, batch), "batch");
    return out;
  }
  for (const double batch : {4.0, 8.0, 16.0, 32.0, 64.0}) add(kRecorded, skewed(8, batch), "batch");
  for (const uint32_t workers : {4U, 16U, 24U, 64U}) add(kRecorded, skewed(workers, 16), "workers");
  for (const double batch : {4.0, 16.0}) {
    add(kRecorded, {.workers = 8, .batch = batch, .mix = sim::StudyMix::kEven});
    add(kRecorded, {.workers = 8, .batch = batch, .mix = sim::StudyMix::kDrifting});
  }
  add(kRecorded, {.workers = 8, .batch = 16, .mix = sim::StudyMix::kSkewed, .unlike = true});
  add(kRecorded, {.workers = 8, .batch = 16, .mix = sim::StudyMix::kSkewed, .stale = true});
  for (const double batch : {4.0, 16.0, 64.0, 256.0}) add(kSynthetic, skewed(8, batch), "synthetic");
  add(kSynthetic, {.workers = 8, .batch = 16, .mix = sim::StudyMix::kDrifting});
  for (const double batch : {4.0, 8.0}) add(kBundled, skewed(4, batch));
  return out;
}

Result<std::vector<sim::StudyPool>> study_pools(const PoliciesBench& bench, bool quick) {
  std::vector<sim::StudyPool> out;
  const std::string shipped = (std::filesystem::path(find_root()) / "data" / "routing" / "gpt_oss_20b").string();
  Result<sim::StudyPool> made = recorded_pool(bench.routing.empty() ? shipped : bench.routing);
  if (!made) return std::move(made).error();
  out.push_back(*std::move(made));
  if (quick) return out;
  for (const auto& make : {synthetic_pool, bundled_pool}) {
    made = make();
    if (!made) return std::move(made).error();
    out.push_back(*std::move(made));
  }
  return out;
}

void run_tasks(const PoliciesBench& bench, const std::vector<sim::StudyPool>& pools,
               const std::vector<sim::StudyPolicy>& policies, std::vector<StudyTask>& tasks) {
  std::vector<uint64_t> seeds;
  for (int64_t seed = 1; seed <= bench.seeds; ++seed) seeds.push_back(static_cast<uint64_t>(seed));
  const auto threads =
      bench.threads > 0 ? static_cast<size_t>(bench.threads) : std::max<size_t>(1, std::thread::hardware_concurrency());
  std::atomic<size_t> next = 0;
  std::mutex mutex;
  size_t done = 0;
  Progress progress("cells", tasks.size());
  std::vector<std::jthread> workers;
  for (size_t t = 0; t < std::min(threads, tasks.size()); ++t) {
    workers.emplace_back([&] {
      for (size_t at = next++; at < tasks.size(); at = next++) {
        StudyTask& task = tasks[at];
        task.rows = sim::run_study_cell(pools[task.pool], task.cell, policies, seeds);
        const std::lock_guard lock(mutex);
        progress.set(++done);
      }
    });
  }
}

std::string change_text(double change, double error) {
  return error > 0 ? fmt::format("{:+.1f} ±{:.1f}", 100 * change, 100 * error) : fmt::format("{:+.1f}", 100 * change);
}

std::string policies_text(const std::vector<sim::StudyPool>& pools, const std::vector<StudyTask>& tasks) {
  std::string out;
  for (const StudyTask& task : tasks) {
    Table table({"policy", "TPOT ms", "mean %", "p50 %", "p99 %", "experts a layer", "batch"});
    for (const sim::StudyRow& row : *task.rows) {
      table.row({row.policy, fmt::format("{:.2f}", 1e3 * row.tpot_s[0]), change_text(row.change[0], row.error[0]),
                 change_text(row.change[1], row.error[1]), change_text(row.change[2], row.error[2]),
                 fmt::format("{:.1f}", row.active_experts), fmt::format("{:.1f}", row.batch)});
    }
    out += fmt::format("{}: {}\n\n{}\n", pools[task.pool].name, cell_text(task.cell), table.text());
  }
  out += "Change of TPOT against the best of round-robin, least-loaded and power-of-two in that cell and figure.\n";
  return out;
}

Json policies_json(const std::vector<sim::StudyPool>& pools, const std::vector<StudyTask>& tasks,
                   const Machine& machine) {
  Json out = {{"bench", "policies"}, {"machine", machine_json(machine)}, {"cells", Json::array()}};
  for (const StudyTask& task : tasks) {
    Json cell = {{"data", pools[task.pool].name},   {"workers", task.cell.workers}, {"batch", task.cell.batch},
                 {"mix", to_string(task.cell.mix)}, {"unlike", task.cell.unlike},   {"stale", task.cell.stale}};
    for (const sim::StudyRow& row : *task.rows) {
      cell["rows"].push_back({{"policy", row.policy},
                              {"tpot_s", row.tpot_s},
                              {"change", row.change},
                              {"error", row.error},
                              {"active_experts", row.active_experts},
                              {"batch", row.batch}});
    }
    out["cells"].push_back(std::move(cell));
  }
  return out;
}

// Mean TPOT's change over the cells of one chart, a line a policy.
Status draw_policies(const PoliciesBench& bench, const std::vector<StudyTask>& tasks, std::string_view which,
                     const std::string& title, bool by_workers) {
  Chart chart{title,
              by_workers ? "decode workers" : "mean batch of a decode worker",
              "change of mean TPOT, %",
              {},
              "against the best of round-robin, least-loaded and power-of-two"};
  for (size_t p = 0;; ++p) {
    Series series;
    for (const StudyTask& task : tasks) {
      if (task.chart != which || p >= task.rows->size()) continue;
      const sim::StudyRow& row = (*task.rows)[p];
      series.name = row.policy;
      series.x.push_back(by_workers ? task.cell.workers : task.cell.batch);
      series.y.push_back(100 * row.change[0]);
      series.error.push_back(100 * row.error[0]);
    }
    if (series.x.empty()) break;
    const bool shown = series.name == "least-loaded" || series.name == "domain" || series.name == "band tau=0.1" ||
                       series.name.starts_with("marginal-cost");
    if (shown) chart.series.push_back(std::move(series));
  }
  if (chart.series.empty()) return {};
  return save_svg(bench.output.plots, fmt::format("policies-{}", which), line_chart(chart));
}

Status study_and_report(const PoliciesBench& bench) {
  const Machine machine = this_machine();
  Result<std::vector<sim::StudyPool>> pools = study_pools(bench, bench.quick);
  if (!pools) return std::move(pools).error();
  std::vector<sim::StudyPolicy> policies = sim::study_policies(bench.variants);
  std::vector<StudyTask> tasks = study_tasks(bench.quick);
  std::erase_if(tasks, [&](const StudyTask& task) {
    const std::string text = fmt::format("{}: {}", (*pools)[task.pool].name, cell_text(task.cell));
    return text.find(bench.only) == std::string::npos;
  });
  if (tasks.empty()) return invalid(fmt::format("--only: no cell has '{}' in its name", bench.only), "only");
  run_tasks(bench, *pools, policies, tasks);
  for (const StudyTask& task : tasks) {
    if (!task.rows) return task.rows.error();
  }
  if (!bench.output.plots.empty()) {
    const Status drawn[] = {
        draw_policies(bench, tasks, "batch", "Recorded routing of gpt-oss-20b, 8 decode workers, skewed mix", false),
        draw_policies(bench, tasks, "workers", "Recorded routing of gpt-oss-20b, mean batch 16, skewed mix", true),
        draw_policies(bench, tasks, "synthetic", "Synthetic routing, 128 experts, 8 decode workers, skewed mix",
                      false)};
    for (const Status& status : drawn) {
      if (!status) return status;
    }
  }
  if (bench.output.json) {
    fmt::print("{}\n", dump_json(policies_json(*pools, tasks, machine)));
    return {};
  }
  fmt::print("{}{} seeds. {}\n", policies_text(*pools, tasks), bench.seeds, machine_text(machine));
  return {};
}

}  // namespace

int bench_policies(Args args) {
  PoliciesBench bench;
  ConfigSchema schema(
      "bench policies [OPTIONS]",
      "Compares all decode policies on the same simulated requests, over loads, cluster sizes and mixes, "
      "on recorded and on synthetic routing.");
  schema.flag("quick", &bench.quick, "two cells");
  schema.flag("variants", &bench.variants, "and the variants of marginal-cost that were not taken");
  schema.integer("seeds", &bench.seeds, 1, 100, "of requests; errors are over them");
  schema.integer("threads", &bench.threads, 0, 1024, "cells side by side; 0: one for each core");
  schema.text("only", &bench.only, "cells with this in their name, as the table shows it");
  schema.text("routing", &bench.routing, "folder of token decisions of gpt-oss-20b, instead of the part that ships");
  bench.output.declare(schema, /*draws=*/true);
  if (const auto status = parse_bench_flags(schema, args)) return *status;
  if (const Status done = study_and_report(bench); !done) return fail("bench policies", done.error());
  return 0;
}

}  // namespace kindred::cli
