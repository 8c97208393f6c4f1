// `kindred bench pressure --live`: the same question as the simulations, asked of processes. A worker with several
// paced engines (one for each order of queues that is compared), and for each run a fresh router in front of it; all
// policies get the same prompts at the same times, and take turns.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/result.h"
#include "cli/bench_pressure.h"

namespace kindred::cli {

// Of an engine. The worker admits a request as soon as a sequence is free, so with its usual 64 nobody would wait, and
// the order of the queue would not matter. With 8 the engines can still do their rates: by the bundled profile a
// request has its sequence for about 19 full steps, and an engine computes one prompt of the usual lengths in 2.4 steps
// or more.
inline constexpr int64_t kLiveSequences = 8;
inline constexpr int64_t kLiveOutputTokens = 16;

struct PressureLive {
  // One set-up, whose highest rate is 1: `loads` are shares of what the engines can do with a mix, or requests a second
  // if rates were asked for.
  PressureGrid grid;
  std::vector<double> capacity_per_s;      // [mix]: requests, of all engines
  std::vector<double> mean_prompt_tokens;  // [mix], as it is drawn
  bool rates_given = false;
  int64_t first_seed = 1;
  std::string pace;                  // the profile's name
  double step_s = 0;                 // a full step, by the profile
  double token_scale = 1;            // of lengths, and of pressure's constants in tokens
  policy::PressureOptions pressure;  // as the routers got it
  size_t requests = 0;
  double measured_prompt_tokens = 0;   // mean, as the worker counted them
  int64_t token_budget = 0;            // of a step
  std::vector<double> overrun_shares;  // [as cells]: of a run's steps, those that took longer than the profile says
  double paced_steps = 0, pace_overruns = 0;  // of all runs
  std::string first_error;                    // of the requests that failed

  double rate(size_t mix, size_t load) const { return grid.loads[load] * (rates_given ? 1 : capacity_per_s[mix]); }
  double overrun_share() const { return paced_steps > 0 ? pace_overruns / paced_steps : 0; }
  double overrun_share(size_t mix, size_t load, size_t arm) const;  // mean over seeds
};

// `bench` with what --live takes for what was left out: mixes, policies, model, pace profile. Error: kInvalid, naming
// the flag: what only the simulations know, rates that are none, unknown policies.
Result<PressureBench> live_pressure_bench(PressureBench bench);
Result<PressureLive> run_pressure_live(const PressureBench& bench, std::vector<PressureArm> arms);

std::string pressure_live_text(const PressureLive& live, const Machine& machine);
Json pressure_live_json(const PressureLive& live);

}  // namespace kindred::cli
