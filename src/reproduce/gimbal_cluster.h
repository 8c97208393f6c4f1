// Gimbal's test bed in the simulator: one worker of two data-parallel engines in lockstep, each with tensor parallelism
// over two H100s, the experts of Qwen3-30B-A3B on all four; and the systems that are compared on it. Engines are chosen
// by the production policies, experts are placed by the solvers of src/place.
//
// Thread-safety: a GimbalTraffic belongs to one thread; run_gimbal_cell() is a function of its arguments.
#pragma once

#include <array>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sim/cluster.h"
#include "sim/expert_process.h"
#include "sim/length_mix.h"
#include "sim/profile.h"
#include "sim/trace.h"

namespace kindred::reproduce {

inline constexpr uint32_t kGimbalEngines = 2, kGimbalTensor = 2, kGimbalRanks = 4;
inline constexpr std::array kGimbalRates = {2.0, 2.5, 3.0, 3.5, 4.0};  // requests a second

//   vllm          request-count, EPLB each window
//   no-eplb       request-count, experts in order of their index, which stay: what EPLB is worth
//   moetuner      request-count, MoETuner's placement of earlier traffic, which stays
//   sem-moe       each request to the engine that was found best for it beforehand, Sem-MoE's placement, which stays
//   dp            pressure without its expert term and shortest prompt first with aging, EPLB
//   ep            request-count, Gimbal's greedy each window
//   both          dp and ep, no feedback
//   gimbal        both, engines' traces with expert pressure
//   uncalibrated  gimbal with weights (1, 1, 0)
//   kindred       pressure with feedback, first come first served, `flow` under place::Rebalancer's rule
inline constexpr std::array<std::string_view, 10> kGimbalArms = {
    "vllm", "no-eplb", "moetuner", "sem-moe", "dp", "ep", "both", "gimbal", "uncalibrated", "kindred"};
// The parts of `kindred`, which are compared in `kindred bench coordinate`:
//   kindred-dp    pressure without its expert term, experts in order of their index, which stay
//   kindred-ep    request-count, `flow` under place::Rebalancer's rule
//   kindred-both  pressure and `flow`, no feedback
inline constexpr std::array<std::string_view, 3> kKindredParts = {"kindred-dp", "kindred-ep", "kindred-both"};

// How the test bed differs from the profile's GPUs at their best; fitted to the baseline (reproduce/gimbal_run.h).
struct GimbalLaw {
  double lengths = 1;        // times the trace's prompts and outputs
  double host_layer_us = 0;  // beside the profile's: a layer's time that depends on nothing
  // Times the profile's: the experts' kernels, the exchange between ranks, and all of a step.
  double experts = 1, links = 1, all = 1;
};

struct GimbalSetup {
  sim::Profile profile;  // h100-qwen3-30b-a3b
  GimbalLaw law = {};
  // So many of each domain's requests go to an engine of theirs, whatever the arm: what sources that differ would be
  // worth. In [0, 1].
  double by_domain = 0;
  double expert_weight = 2048;                        // policy::PressureOptions
  double window_s = 30;                               // between two placements
  double first_stall_s = 1.08, later_stall_s = 0.72;  // of a rearrangement (section 2.2.2)
};

// Requests of one mix and seed, at one a second, and what is known beforehand of such traffic.
struct GimbalWorkload {
  sim::LengthMix mix = sim::LengthMix::kRandom;
  uint64_t seed = 0;
  std::vector<sim::SimRequest> requests = {};  // `assigned`: sem-moe's engine
  std::shared_ptr<const place::Placement> moetuner = {}, sem_moe = {};
};

struct GimbalTrafficOptions {
  uint32_t requests = 1000;
  double lengths = 1;
  double skew = 1;  // times the deviations of the calibrated experts; 0: all experts are alike
  uint32_t domains = 8;
};

class GimbalTraffic {
 public:
  // `trace` is borrowed. Error: of the process.
  static Result<std::unique_ptr<GimbalTraffic>> make(const sim::Profile& profile, const sim::Trace& trace,
                                                     const GimbalTrafficOptions& options);
  // Up to 25 KB a request. Error: of the lengths.
  Result<GimbalWorkload> draw(sim::LengthMix mix, uint64_t seed);

 private:
  GimbalTraffic(const sim::Trace& trace, const GimbalTrafficOptions& options) : trace_(trace), options_(options) {}
  Result<std::vector<sim::SimRequest>> requests(sim::LengthMix mix, uint64_t seed, uint32_t count);

  const sim::Trace& trace_;
  GimbalTrafficOptions options_;
  std::unique_ptr<sim::ExpertProcess> process_;
};

struct GimbalCell {
  static constexpr size_t kCount = 14;
  double ttft_s = 0, ttft_p99_s = 0, tpot_s = 0, e2e_s = 0;  // means but for p99
  double requests_per_s = 0;
  double running = 0, kv = 0;   // of an engine, over time
  double gap_tokens_per_s = 0;  // of prompts, between the engines; mean over vLLM's log intervals of 10 s
  double remote_share = 0;      // of copies
  double max_over_mean = 0;     // of ranks' copies, each layer and step
  double experts = 0, worst_rank_experts = 0;  // distinct, a layer, in decode steps
  double migrations = 0, stalled_s = 0;

  std::array<double*, kCount> all() {
    return {&ttft_s,           &ttft_p99_s,   &tpot_s,        &e2e_s,   &requests_per_s,     &running,    &kv,
            &gap_tokens_per_s, &remote_share, &max_over_mean, &experts, &worst_rank_experts, &migrations, &stalled_s};
  }
};

// `arm` of kGimbalArms or kKindredParts. Error: kInvalid: another one; or of the run.
Result<GimbalCell> run_gimbal_cell(const GimbalSetup& setup, const GimbalWorkload& workload, double rate,
                                   std::string_view arm);

}  // namespace kindred::reproduce
