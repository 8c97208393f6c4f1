// What is said of a simulation: tables, JSON, files.

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "cli/plot.h"
#include "cli/simulate.h"
#include "cli/terminal.h"

namespace kindred::cli {
namespace {

constexpr size_t kCurvePoints = 200;

std::string ms(double seconds) { return fmt::format("{:.1f}", seconds * 1e3); }
std::string precise_ms(double seconds) { return fmt::format("{:.2f}", seconds * 1e3); }
std::string whole_percent(double share) { return fmt::format("{:.0f} %", share * 100); }
std::string change(double now, double base) {
  return base > 0 ? fmt::format("{:+.1f} %", 100 * (now / base - 1)) : std::string("-");
}

size_t failed(const sim::Summary& summary) { return summary.requests - summary.ended[0]; }

std::string policies_table(const std::vector<SimulateRun>& runs) {
  Table latency({"policy", "TTFT ms p50", "p99", "TPOT ms mean", "p50", "p99", "TPOT", "tokens/s", "failed"});
  Table work({"policy", "experts a layer", "change", "decode batch", "step ms", "busy", "KV mean", "peak", "preempted",
              "prefill busy", "cached"});
  const sim::Summary& base = runs.front().summary;
  for (const SimulateRun& run : runs) {
    const sim::Summary& s = run.summary;
    const bool first = &run == &runs.front();
    latency.row({run.policy, ms(s.ttft_s.p50), ms(s.ttft_s.p99), precise_ms(s.tpot_s.mean), precise_ms(s.tpot_s.p50),
                 precise_ms(s.tpot_s.p99), first ? "" : change(s.tpot_s.mean, base.tpot_s.mean),
                 fmt::format("{:.0f}", s.output_tokens_per_s), fmt::to_string(failed(s))});
    work.row({run.policy, fmt::format("{:.2f}", s.active_experts),
              first ? "" : change(s.active_experts, base.active_experts), fmt::format("{:.1f}", s.decode_batch),
              precise_ms(s.decode_step_s), whole_percent(s.decode.busy), whole_percent(s.decode.kv_mean),
              whole_percent(s.decode.kv_peak), fmt::to_string(s.decode.preemptions + s.prefill.preemptions),
              s.prefill.workers > 0 ? whole_percent(s.prefill.busy) : "-",
              whole_percent(s.prefill.workers > 0 ? s.prefill.cached : s.decode.cached)});
  }
  return latency.text() + "\nDecode workers, over steps that only decode:\n" + work.text();
}

std::string workers_table(const SimulateRun& run) {
  Table table({"worker", "busy", "steps", "decode batch", "experts a layer", "step ms", "prompt tokens", "KV mean",
               "peak", "preempted"});
  for (const sim::WorkerReport& worker : run.result.workers) {
    const auto steps = static_cast<double>(std::max<uint64_t>(worker.decode_steps, 1));
    table.row({worker.name, whole_percent(worker.here_s > 0 ? worker.busy_s / worker.here_s : 0),
               fmt::to_string(worker.steps), fmt::format("{:.1f}", static_cast<double>(worker.decode_tokens) / steps),
               fmt::format("{:.2f}", worker.expert_reads / steps),
               precise_ms(worker.busy_s / static_cast<double>(std::max<uint64_t>(worker.steps, 1))),
               fmt::to_string(worker.prefill_tokens),
               whole_percent(worker.here_s > 0 ? worker.kv_share_s / worker.here_s : 0), whole_percent(worker.kv_peak),
               fmt::to_string(worker.preemptions)});
  }
  return fmt::format("\n{}, worker by worker:\n{}", run.policy, table.text());
}

std::string fallbacks_text(const SimulateRun& run) {
  std::string out;
  for (size_t i = 1; i < run.result.fallbacks.size(); ++i) {
    if (run.result.fallbacks[i] == 0) continue;
    out += fmt::format("  {}: {} decisions by load alone: {}\n", run.policy, run.result.fallbacks[i],
                       policy::to_string(static_cast<policy::FallbackReason>(i)));
  }
  return out;
}

std::string endings_text(const SimulateRun& run) {
  std::string out;
  for (size_t i = 1; i < run.summary.ended.size(); ++i) {
    if (run.summary.ended.at(i) == 0) continue;
    out += fmt::format("  {}: {} requests failed: {}\n", run.policy, run.summary.ended.at(i),
                       sim::to_string(static_cast<sim::Ended>(i)));
  }
  return out;
}

Json worker_json(const sim::WorkerReport& worker) {
  return {
      {"name", worker.name},
      {"role", to_string(worker.role)},
      {"steps", worker.steps},
      {"decode_steps", worker.decode_steps},
      {"busy_s", worker.busy_s},
      {"here_s", worker.here_s},
      {"decode_tokens", worker.decode_tokens},
      {"prefill_tokens", worker.prefill_tokens},
      {"cached_tokens", worker.cached_tokens},
      {"active_experts", worker.decode_steps > 0 ? worker.expert_reads / static_cast<double>(worker.decode_steps) : 0},
      {"preemptions", worker.preemptions},
      {"kv_mean", worker.here_s > 0 ? worker.kv_share_s / worker.here_s : 0},
      {"kv_peak", worker.kv_peak}};
}

// "run.csv" of several policies becomes "run.locality-band.csv".
std::string file_of(const std::string& path, const SimulateRun& run, bool several) {
  if (!several) return path;
  const std::filesystem::path p(path);
  return (p.parent_path() / fmt::format("{}.{}{}", p.stem().string(), run.policy, p.extension().string())).string();
}

// Share of requests (y) that took no longer than x.
Series curve(const std::string& name, std::vector<double> values_ms) {
  std::ranges::sort(values_ms);
  Series out;
  out.name = name;
  out.markers = false;
  const size_t points = std::min(values_ms.size(), kCurvePoints);
  for (size_t i = 1; i <= points; ++i) {
    const size_t rank = i * values_ms.size() / points;
    out.x.push_back(values_ms[rank - 1]);
    out.y.push_back(static_cast<double>(rank) / static_cast<double>(values_ms.size()));
  }
  return out;
}

Status save_plots(const SimulateOptions& options, const SimulateSetup& setup, const std::vector<SimulateRun>& runs) {
  const std::string note = fmt::format("simulated: {}, {}", options.workers, setup.model);
  Chart ttft{"Time to first token", "ms", "share of requests", {}, note};
  Chart tpot{"Time per output token", "ms", "share of requests", {}, note};
  BarChart experts{"Active experts in a decode step", "a layer", {}, {"mean"}, {{}}, note};
  for (const SimulateRun& run : runs) {
    std::vector<double> first_ms, each_ms;
    for (const sim::RequestRecord& record : run.result.requests) {
      if (record.ended != sim::Ended::kOk) continue;
      first_ms.push_back(record.ttft_s() * 1e3);
      if (record.output_tokens > 1) each_ms.push_back(record.tpot_s() * 1e3);
    }
    ttft.series.push_back(curve(run.policy, std::move(first_ms)));
    tpot.series.push_back(curve(run.policy, std::move(each_ms)));
    experts.categories.push_back(run.policy);
    experts.values[0].push_back(run.summary.active_experts);
  }
  if (Status ok = save_svg(options.plots, "simulate-ttft", line_chart(ttft)); !ok) return ok;
  if (Status ok = save_svg(options.plots, "simulate-tpot", line_chart(tpot)); !ok) return ok;
  return save_svg(options.plots, "simulate-experts", bar_chart(experts));
}

}  // namespace

std::string simulate_text(const SimulateOptions& options, const SimulateSetup& setup,
                          const std::vector<SimulateRun>& runs) {
  std::string out =
      fmt::format("{} on {}{}; {} requests, {:.1f} a second\nExperts: {}\n", setup.model, options.workers,
                  options.ranks > 1 ? fmt::format(" with {} ranks each", options.ranks) : "", setup.requests.size(),
                  static_cast<double>(setup.requests.size()) /
                      std::max(setup.requests.back().arrival_s - setup.requests.front().arrival_s, 1e-9),
                  setup.experts);
  if (setup.fitted) {
    out += fmt::format(
        "Cohorts: fitted to {} other requests (rho {:.2f}); active experts a layer in a batch of {}: {:.1f} of one "
        "cohort, {:.1f} of any\n",
        setup.fitted->model->data().samples, setup.fitted->rho, setup.fitted->batch, setup.fitted->active_experts,
        setup.fitted->active_random);
  }
  out += "\n" + policies_table(runs);
  if (options.per_worker) {
    for (const SimulateRun& run : runs) out += workers_table(run);
  }
  for (const SimulateRun& run : runs) out += endings_text(run) + fallbacks_text(run);
  double simulated_s = 0, took_s = 0;
  uint64_t steps = 0;
  for (const SimulateRun& run : runs) {
    simulated_s += run.result.end_s;
    took_s += run.took_s;
    steps += run.result.steps_run;
  }
  out += fmt::format("\n{:.0f} s simulated in {:.2f} s of processor time: {:.0f} x real time, {} steps\n", simulated_s,
                     took_s, simulated_s / std::max(took_s, 1e-9), steps);
  return out;
}

Json simulate_json(const SimulateOptions& options, const SimulateSetup& setup, const std::vector<SimulateRun>& runs) {
  Json out = {{"model", setup.model},     {"workers", options.workers},
              {"ranks", options.ranks},   {"requests", setup.requests.size()},
              {"experts", setup.experts}, {"seed", options.seed},
              {"policies", Json::array()}};
  if (setup.fitted) {
    out["cohorts"] = {{"samples", setup.fitted->model->data().samples},
                      {"rho", setup.fitted->rho},
                      {"batch", setup.fitted->batch},
                      {"active_experts", setup.fitted->active_experts},
                      {"active_random", setup.fitted->active_random}};
  }
  for (const SimulateRun& run : runs) {
    Json one = {{"policy", run.policy},          {"summary", sim::to_json(run.summary)},
                {"steps", run.result.steps_run}, {"end_s", run.result.end_s},
                {"workers", Json::array()},      {"fallbacks", Json::object()}};
    for (const sim::WorkerReport& worker : run.result.workers) one["workers"].push_back(worker_json(worker));
    for (size_t i = 1; i < run.result.fallbacks.size(); ++i) {
      if (run.result.fallbacks[i] == 0) continue;
      one["fallbacks"][policy::to_string(static_cast<policy::FallbackReason>(i))] = run.result.fallbacks[i];
    }
    out["policies"].push_back(std::move(one));
  }
  return out;
}

Status save_simulation(const SimulateOptions& options, const SimulateSetup& setup,
                       const std::vector<SimulateRun>& runs) {
  const bool several = runs.size() > 1;
  for (const SimulateRun& run : runs) {
    if (!options.csv.empty()) {
      const std::string text = sim::requests_csv(run.result, setup.domains);
      if (Status ok = write_file(file_of(options.csv, run, several), text); !ok) return ok;
    }
    if (!options.perfetto.empty()) {
      const std::string text = sim::steps_trace(run.result);
      if (Status ok = write_file(file_of(options.perfetto, run, several), text); !ok) return ok;
    }
  }
  return options.plots.empty() ? Status() : save_plots(options, setup, runs);
}

}  // namespace kindred::cli
