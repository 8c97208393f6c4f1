// `kindred bench coordinate`, by simulation: what its arms would be on GPUs with links between them.

#include <algorithm>
#include <array>

#include "cli/bench_coordinate.h"
#include "cli/local_cluster.h"
#include "cli/simulate.h"
#include "cli/terminal.h"
#include "sim/trace_reader.h"

namespace kindred::cli {
namespace {

// In the order of coordinate_arms().
constexpr std::array<std::string_view, 5> kSimulatedArms = {"vllm", "kindred-dp", "kindred-ep", "kindred-both",
                                                            "kindred"};
constexpr uint32_t kQuickRequests = 100;
constexpr double kSimulatedWindow_s = 10;  // the worker's own
constexpr double kFewestWindows = 8;       // of a run
constexpr double kEplbWindows = 4;         // that EPLB waits, as in the runs on this machine

}  // namespace

Result<CoordinateSimulation> simulate_coordinate(const CoordinateBench& bench) {
  KINDRED_CHECK(kSimulatedArms.size() == coordinate_arms().size());
  Result<sim::Profile> profile = find_profile("h100-qwen3-30b-a3b");
  if (!profile) return std::move(profile).error();
  const Result<sim::Trace> trace = sim::read_trace(find_root() + "/data/traces/azure_2023_conv.csv.xz");
  if (!trace) return trace.error();
  CoordinateSimulation out;
  if (bench.quick) out.requests = kQuickRequests;
  const auto traffic = reproduce::GimbalTraffic::make(*profile, *trace, {.requests = out.requests});
  if (!traffic) return traffic.error();
  const auto workload = (*traffic)->draw(sim::LengthMix::kRandom, static_cast<uint64_t>(bench.seed));
  if (!workload) return workload.error();
  reproduce::GimbalSetup setup{.profile = *std::move(profile)};
  setup.by_domain = bench.bound_share;
  const double window_s = std::min(kSimulatedWindow_s, out.requests / out.rate / kFewestWindows);
  setup.first_stall_s = setup.later_stall_s = -1;  // what the links take
  Progress progress("simulating", kSimulatedArms.size());
  for (const std::string_view arm : kSimulatedArms) {
    setup.window_s = window_s * (arm == kSimulatedArms.front() ? kEplbWindows : 1);
    auto cell = run_gimbal_cell(setup, *workload, out.rate, arm);
    if (!cell) return std::move(cell).error();
    out.arms.push_back(*cell);
    progress.set(out.arms.size());
  }
  return out;
}

}  // namespace kindred::cli
