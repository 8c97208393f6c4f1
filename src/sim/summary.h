// What a run comes down to, and its files: a line a request (CSV), and a trace for chrome://tracing or
// ui.perfetto.dev.
//
// Units: seconds unless a name says otherwise. Thread-safety: pure functions.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/json.h"
#include "sim/cluster.h"

namespace kindred::sim {

struct Spread {
  double mean = 0, p50 = 0, p90 = 0, p99 = 0;  // 0 without values
};
Spread spread_of(std::vector<double> values);

// Of one role's workers together.
struct RoleSummary {
  size_t workers = 0;
  double busy = 0;     // share of the time they were there
  double step_s = 0;   // mean
  double kv_mean = 0;  // share of blocks in use, over time
  double kv_peak = 0;  // of the fullest
  double cached = 0;   // share of admitted prompt tokens found in the prefix cache
  uint64_t preemptions = 0;
};

struct Summary {
  size_t requests = 0;                                 // measured: those that came after the warm-up
  std::array<size_t, 4> ended{};                       // by Ended
  Spread ttft_s, tpot_s, total_s;                      // of those that ended well; tpot of more than one token
  Spread handoff_s;                                    // from the decode decision to the KV being there
  double duration_s = 0;                               // from the first arrival to the last event
  double output_tokens_per_s = 0, requests_per_s = 0;  // of all requests, warm-up or not
  double decode_batch = 0;                             // mean over steps that only decode
  double active_experts = 0;                           // distinct, a layer, mean over those steps
  double worst_rank_experts = 0;                       // the same, of the rank with the most
  double decode_step_s = 0;                            // mean
  uint64_t retries = 0;
  RoleSummary prefill, decode;  // without prefill workers: `decode` are those that do both
};

// Requests that arrived in the first `warmup_s` are left out of latencies.
Summary summarize(const SimResult& result, double warmup_s = 0);
Json to_json(const Summary& summary);

// With a header; times in seconds since the simulation's start, empty where it did not come to it.
std::string requests_csv(const SimResult& result, std::span<const std::string> domains = {});

// Trace Event Format: a track a worker with its steps (as many as SimResult::steps has), and the requests as
// asynchronous slices: waiting and prefill, handoff, decode.
std::string steps_trace(const SimResult& result);

}  // namespace kindred::sim
