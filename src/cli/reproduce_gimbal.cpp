// `kindred reproduce gimbal`: Gimbal's comparisons in the simulator, fitted to its baseline alone.

#include <fmt/format.h>

#include <cstdlib>
#include <filesystem>
#include <optional>
#include <thread>

#include "base/config.h"
#include "base/json.h"
#include "cli/bench.h"
#include "cli/local_cluster.h"
#include "cli/reproduce.h"
#include "cli/simulate.h"
#include "cli/terminal.h"
#include "sim/trace_reader.h"

namespace kindred::cli {
namespace {

constexpr int64_t kGimbalSeeds = 3, kGimbalRequests = 1000;

struct ReproduceGimbal {
  std::string page, trace, profile = "h100-qwen3-30b-a3b";
  std::vector<std::string> rates;  // empty: all
  int64_t seeds = kGimbalSeeds, requests = kGimbalRequests, threads = 0;
  bool no_scans = false, json = false;
};

ConfigSchema gimbal_schema(ReproduceGimbal& o) {
  ConfigSchema schema("reproduce gimbal [--page docs/reproduction]",
                      "Gimbal's comparisons (DP 2, TP 2, EP 4 on H100s, Qwen3-30B-A3B, five mixes of lengths, five "
                      "rates) in the simulator, fitted to what the paper says of its baseline alone, beside the "
                      "paper's figures; and what would have to be otherwise.");
  schema.integer("seeds", &o.seeds, 1, 100, "of each mix and rate; the paper's are 3");
  schema.list("rate", &o.rates, "of arrivals, requests a second; default: 2, 2.5, 3, 3.5 and 4; the signals need 4");
  schema.integer("requests", &o.requests, 100, 100'000, "of a run; the paper's are 1000");
  schema.flag("no_scans", &o.no_scans, "only the main grid");
  schema.text("page", &o.page, "write gimbal.md and its plots into this folder");
  schema.text("profile", &o.profile, "hardware profile, a name or a file");
  schema.text("trace", &o.trace, "file of requests whose lengths are reshaped; else the one in data/traces");
  schema.integer("threads", &o.threads, 0, 256, "simulations side by side; 0: one per core");
  schema.flag("json", &o.json, "print all figures as JSON");
  return schema;
}

Json gimbal_cell_json(reproduce::GimbalCell cell) {
  constexpr std::array kNames = {
      "ttft_s",           "ttft_p99_s",   "tpot_s",        "e2e_s",   "requests_per_s",     "running",    "kv",
      "gap_tokens_per_s", "remote_share", "max_over_mean", "experts", "worst_rank_experts", "migrations", "stalled_s"};
  static_assert(kNames.size() == reproduce::GimbalCell::kCount);
  Json out;
  for (size_t i = 0; i < kNames.size(); ++i) out[kNames.at(i)] = *cell.all().at(i);
  return out;
}

Json gimbal_json(const reproduce::GimbalReproduction& run) {
  Json out;
  for (const reproduce::GimbalFit& fit : run.fits) {
    out["fits"].push_back({{"slow", to_string(fit.slow)},
                           {"lengths", fit.law.lengths},
                           {"all", fit.law.all},
                           {"host_layer_us", fit.law.host_layer_us},
                           {"experts", fit.law.experts},
                           {"links", fit.law.links},
                           {"baseline", gimbal_cell_json(fit.baseline)}});
  }
  for (const reproduce::GimbalResult& result : run.results) {
    Json one = gimbal_cell_json(result.cell);
    one["arm"] = result.arm;
    one["variant"] = result.variant;
    one["mix"] = to_string(result.mix);
    one["rate"] = result.rate;
    one["seed"] = result.seed;
    out["cells"].push_back(std::move(one));
  }
  return out;
}

Result<reproduce::GimbalReproduction> run_with(const ReproduceGimbal& o) {
  reproduce::GimbalOptions options;
  Result<sim::Profile> profile = find_profile(o.profile);
  if (!profile) return std::move(profile).error();
  options.profile = *std::move(profile);
  Result<sim::Trace> trace =
      sim::read_trace(o.trace.empty() ? find_root() + "/data/traces/azure_2023_conv.csv.xz" : o.trace);
  if (!trace) return std::move(trace).error();
  options.trace = *std::move(trace);
  if (!o.rates.empty()) options.rates.clear();
  for (const std::string& text : o.rates) {
    char* end = nullptr;
    const double rate = std::strtod(text.c_str(), &end);
    if (*end != '\0' || !(rate > 0 && rate <= 1000)) return invalid("--rate: accepted: above 0, to 1000", "rate");
    options.rates.push_back(rate);
  }
  options.requests = static_cast<uint32_t>(o.requests);
  options.seeds = static_cast<uint32_t>(o.seeds);
  options.scans = !o.no_scans;
  options.threads = o.threads > 0 ? static_cast<size_t>(o.threads) : std::max(1U, std::thread::hardware_concurrency());
  std::optional<Progress> progress;
  std::string shown;
  options.on_run = [&](const std::string& what, size_t done, size_t of) {
    if (what != shown) {
      progress.reset();
      progress.emplace(what, of);
      shown = what;
    }
    progress->set(done);
  };
  return reproduce::run_gimbal(options);
}

}  // namespace

int reproduce_gimbal(Args args) {
  ReproduceGimbal o;
  ConfigSchema schema = gimbal_schema(o);
  if (const auto status = parse_bench_flags(schema, args)) return *status;
  const auto run = run_with(o);
  if (!run) return fail("reproduce gimbal", run.error());
  if (o.json) fmt::print("{}\n", dump_json(gimbal_json(*run), 1));
  else fmt::print("{}", gimbal_text(*run));
  if (o.page.empty()) return 0;
  std::string command = "kindred reproduce gimbal";
  if (o.seeds != kGimbalSeeds) command += fmt::format(" --seeds {}", o.seeds);
  for (const std::string& rate : o.rates) command += " --rate " + rate;
  if (o.requests != kGimbalRequests) command += fmt::format(" --requests {}", o.requests);
  if (Status ok = write_gimbal_page(o.page, command, *run); !ok) return fail("reproduce gimbal", ok.error());
  return 0;
}

}  // namespace kindred::cli
