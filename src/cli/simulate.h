// `kindred simulate`, in parts: what is asked for, what is simulated, and what is said of it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/config.h"
#include "base/json.h"
#include "base/result.h"
#include "sim/cluster.h"
#include "sim/cohort_fit.h"
#include "sim/expert_process.h"
#include "sim/profile.h"
#include "sim/summary.h"
#include "sim/trace.h"

namespace kindred::cli {

struct SimulateOptions {
  std::string profile = "h200-qwen3-30b-a3b";
  std::string workers = "8P16D";
  int64_t ranks = 1, engines = 0, kv_tokens = 0, token_budget = 8192, max_running = 256;
  bool no_prefix_cache = false;
  std::vector<std::string> policies = {"least-loaded", "locality-band"};
  std::string prefill_policy = "prefix-hash", tie_break = "rotate", load = "requests";
  std::vector<std::string> engine_policies;
  std::string queue_policy = "fcfs";
  double queue_age = 5;
  double tau = 0.1, load_cap = 1.25;
  int64_t trace_ms = 20, trace_delay_ms = 1;
  int64_t poll_ms = 1000, probe_ms = 1000, routers = 1, retries = 2, decode_inflight = 0;
  std::vector<std::string> events;
  std::string trace, lengths = "even";
  bool resample = false;
  double rate = 100, burstiness = 1, seconds = 60, warmup = 0;
  int64_t prompt_tokens = 1000, output_tokens = 250, most_requests = 1'000'000;
  std::string experts = "synthetic", cohorts;
  int64_t domains = 8, calibration = 512;
  double base = -1, domain = -1, request = -1, drift = -1, phase = -1;  // below 0: as calibrated
  int64_t seed = 1;
  bool json = false, per_worker = false;
  std::string csv, plots, perfetto;

  void declare(ConfigSchema& schema);
};

// By a name of profiles/, or a path. Error: kInvalid, with the names that there are; that of reading the file.
Result<sim::Profile> find_profile(const std::string& name);

// All that the policies have in common.
struct SimulateSetup {
  sim::ClusterOptions cluster;  // but for the policy
  std::vector<sim::SimRequest> requests;
  std::vector<std::string> domains;
  std::string model, experts;                // for people
  std::optional<sim::FittedCohorts> fitted;  // if a policy looks at experts, and no file was given
};

// Error: kInvalid, naming the option; that of reading files.
Result<SimulateSetup> set_up_simulation(const SimulateOptions& options);

// The parts of it that --serve needs. Groups and events; returns the first profile, by which experts are drawn.
Result<sim::Profile> set_up_workers(const SimulateOptions& options, uint32_t piece_tokens, SimulateSetup& out);
Result<std::unique_ptr<sim::ExpertProcess>> set_up_experts(const SimulateOptions& options, const sim::Profile& profile);

struct SimulateRun {
  std::string policy;
  sim::SimResult result;
  sim::Summary summary;
  double took_s = 0;  // processor time
};
Result<std::vector<SimulateRun>> simulate_all(const SimulateOptions& options, const SimulateSetup& setup);

std::string simulate_text(const SimulateOptions& options, const SimulateSetup& setup,
                          const std::vector<SimulateRun>& runs);
Json simulate_json(const SimulateOptions& options, const SimulateSetup& setup, const std::vector<SimulateRun>& runs);
// The files that were asked for.
Status save_simulation(const SimulateOptions& options, const SimulateSetup& setup,
                       const std::vector<SimulateRun>& runs);

}  // namespace kindred::cli
