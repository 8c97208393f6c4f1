// The simulations of `kindred bench pressure`: every policy on the same requests.

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <mutex>
#include <numeric>
#include <thread>

#include "cli/bench_pressure.h"
#include "cli/local_cluster.h"
#include "cli/simulate.h"
#include "cli/terminal.h"
#include "sim/expert_load.h"
#include "sim/trace_reader.h"

namespace kindred::cli {
namespace {

// The highest rates are those from which on request-count lets queues grow, for the mixes of the longest prompts.
constexpr auto kSetups = std::to_array<PressureSetup>({
    {"dp2", "2 engines in lockstep, experts over their 2 ranks", 2, 2, 40},
    {"dp4", "4 engines in lockstep, experts over their 4 ranks", 4, 4, 90},
    {"2x1", "2 engines apart, each with all experts", 2, 1, 25},
    {"4x1", "4 engines apart, each with all experts", 4, 1, 50},
});
constexpr auto kUsualSetups = std::to_array<std::string_view>({"dp2", "dp4"});
constexpr auto kLoads = std::to_array<double>({0.5, 0.625, 0.75, 0.875, 1});
constexpr uint32_t kPressureKvBlock = 16;
constexpr uint32_t kPressureBudget = 8192, kPressureRunning = 256;
constexpr size_t kPressureDomains = 8;

// Requests of one mix and seed, but for their times: the same for all rates, which only stretch the times.
struct Workload {
  std::vector<sim::SimRequest> requests;  // at a rate of 1 a second
};

struct Job {
  size_t setup, mix, load, seed, arm;
};

class Grid {
 public:
  Grid(const PressureBench& bench, std::vector<PressureArm> arms) : bench_(bench) {
    out_.arms = std::move(arms);
    out_.seeds = bench.quick ? 1 : bench.seeds;
  }
  Status prepare();
  Result<PressureGrid> run();

 private:
  Status choose();
  Result<Workload> workload(sim::ExpertProcess& process, std::span<const sim::TraceRequest> trace, sim::LengthMix mix,
                            uint64_t seed) const;
  sim::ClusterOptions cluster(const PressureSetup& setup, const PressureArm& arm) const;
  Result<PressureFigures> run_one(const Job& job);
  const Workload& workload_of(const Job& job) const {
    return workloads_[job.mix * static_cast<size_t>(out_.seeds) + job.seed];
  }
  const std::vector<int32_t>& assigned_to(const Job& job) const {
    return assigned_[(job.setup * out_.mixes.size() + job.mix) * static_cast<size_t>(out_.seeds) + job.seed];
  }

  const PressureBench& bench_;
  PressureGrid out_;
  sim::Profile profile_;
  std::shared_ptr<const sim::StepCost> cost_;
  std::vector<Workload> workloads_;             // [mix, seed]
  std::vector<std::vector<int32_t>> assigned_;  // [setup, mix, seed]: replay's engine of each request
  std::atomic<uint64_t> failed_{0};
};

// Sem-MoE's oracle: each request to the engine whose ranks hold more of its experts than is usual, as long as that
// engine has not got its share of the requests; who has most to gain chooses first.
std::vector<int32_t> oracle(std::span<const sim::SimRequest> requests, const PressureSetup& setup) {
  std::vector<int32_t> out(requests.size(), -1);
  if (setup.ranks < 2 || requests.empty()) return out;
  const expert::ExpertShape& shape = requests[0].experts.prompt->shape;
  const auto layers = static_cast<uint32_t>(shape.layers.size());
  sim::ExpertLoad load(
      std::make_shared<sim::ExpertRanks>(sim::ExpertRanks::linear(layers, shape.experts, setup.ranks)));
  const uint32_t ranks_each = setup.ranks / setup.engines;
  const size_t n = requests.size(), engines = setup.engines;
  std::vector<double> share(n * engines), mean(engines, 0);
  for (size_t i = 0; i < n; ++i) {
    for (uint32_t e = 0; e < engines; ++e) {
      share[i * engines + e] = load.prompt_share(requests[i].experts, e * ranks_each, (e + 1) * ranks_each);
      mean[e] += share[i * engines + e] / static_cast<double>(n);
    }
  }
  struct Wish {
    double gain;
    uint32_t request, engine;
  };
  std::vector<Wish> wishes;
  for (uint32_t i = 0; i < n; ++i) {
    for (uint32_t e = 0; e < engines; ++e) wishes.push_back({share[i * engines + e] - mean[e], i, e});
  }
  std::ranges::stable_sort(wishes, [](const Wish& a, const Wish& b) { return a.gain > b.gain; });
  std::vector<size_t> places(engines, (n + engines - 1) / engines);
  for (const Wish& wish : wishes) {
    if (out[wish.request] >= 0 || places[wish.engine] == 0) continue;
    out[wish.request] = static_cast<int32_t>(wish.engine);
    --places[wish.engine];
  }
  return out;
}

double prompt_gap(const sim::WorkerReport& worker, double first_s, double last_s) {
  const auto begin = static_cast<size_t>(first_s), end = static_cast<size_t>(last_s) + 1;
  double sum = 0;
  for (size_t second = begin; second < end; ++second) {
    double most = 0, least = HUGE_VAL;
    for (const sim::EngineReport& engine : worker.engines) {
      const auto& by_s = engine.prompt_tokens_by_s;
      const double tokens = second < by_s.size() ? by_s[second] : 0;
      most = std::max(most, tokens);
      least = std::min(least, tokens);
    }
    sum += most - least;
  }
  return sum / static_cast<double>(end - begin);
}

Status Grid::choose() {
  for (const PressureSetup& setup : kSetups) {
    const bool wanted = bench_.setups.empty() ? std::ranges::find(kUsualSetups, setup.name) != kUsualSetups.end()
                                              : std::ranges::find(bench_.setups, setup.name) != bench_.setups.end();
    if (!wanted) continue;
    out_.setups.push_back(setup);
    out_.setups.back().highest_rate *= bench_.scale;
  }
  if (out_.setups.size() < bench_.setups.size() || out_.setups.empty()) {
    return invalid("--setup: accepted: dp2, dp4, 2x1, 4x1", "setup");
  }
  std::vector<std::string> mixes = bench_.mixes;
  if (mixes.empty()) mixes.assign(sim::length_mix_names().begin(), sim::length_mix_names().end());
  if (bench_.quick && bench_.mixes.empty()) mixes = {"random", "two-end"};
  for (const std::string& name : mixes) {
    const Result<sim::LengthMix> mix = sim::parse_length_mix(name);
    if (!mix) return mix.error();
    out_.mixes.push_back(*mix);
  }
  out_.loads.assign(kLoads.begin(), kLoads.end());
  if (bench_.quick) out_.loads = {0.75, 1};
  return {};
}

Result<Workload> Grid::workload(sim::ExpertProcess& process, std::span<const sim::TraceRequest> trace,
                                sim::LengthMix mix, uint64_t seed) const {
  const auto count = static_cast<uint32_t>(bench_.requests);
  Result<std::vector<sim::TraceRequest>> lengths = sim::reshape(trace, {.mix = mix, .requests = count, .seed = seed});
  if (!lengths) return std::move(lengths).error();
  Result<sim::Trace> arrivals = sim::draw_arrivals({.requests = count, .rate_per_s = 1, .seed = seed});
  if (!arrivals) return std::move(arrivals).error();
  Workload out;
  for (uint32_t i = 0; i < count; ++i) {
    const sim::TraceRequest& given = (*lengths)[i];
    out.requests.push_back({.arrival_s = arrivals->requests[i].arrival_s,
                            .prompt_tokens = given.prompt_tokens,
                            .output_tokens = given.output_tokens,
                            .experts = process.experts(given, seed << 32 | i)});
  }
  return out;
}

Status Grid::prepare() {
  if (Status ok = choose(); !ok) return ok;
  Result<sim::Profile> profile = find_profile(bench_.profile);
  if (!profile) return std::move(profile).error();
  profile_ = *std::move(profile);
  cost_ = std::make_shared<sim::ProfileCost>(profile_);
  Result<sim::Trace> trace = pressure_lengths(bench_);
  if (!trace) return std::move(trace).error();
  expert::ExpertShape shape;
  shape.layers.resize(profile_.dims.moe_layers);
  std::iota(shape.layers.begin(), shape.layers.end(), 0U);
  shape.experts = profile_.dims.experts;
  shape.top_k = profile_.dims.top_k;
  sim::SyntheticOptions synthetic = sim::calibrated_synthetic(shape);
  synthetic.domains.clear();
  for (size_t d = 0; d < kPressureDomains; ++d) synthetic.domains.push_back(fmt::format("domain-{}", d));
  auto process = sim::make_synthetic(synthetic);
  if (!process) return std::move(process).error();
  Progress progress("drawing requests", out_.mixes.size() * static_cast<size_t>(out_.seeds));
  for (const sim::LengthMix mix : out_.mixes) {
    for (int64_t seed = 0; seed < out_.seeds; ++seed) {
      Result<Workload> made =
          workload(**process, trace->requests, mix, static_cast<uint64_t>(bench_.first_seed + seed));
      if (!made) return std::move(made).error();
      workloads_.push_back(*std::move(made));
      progress.set(workloads_.size());
    }
  }
  for (const PressureSetup& setup : out_.setups) {
    for (const Workload& work : workloads_) assigned_.push_back(oracle(work.requests, setup));
  }
  return {};
}

sim::ClusterOptions Grid::cluster(const PressureSetup& setup, const PressureArm& arm) const {
  sim::WorkerGroup group;
  group.name = setup.name;
  group.cost = cost_;
  group.engines = setup.engines;
  group.ranks = setup.ranks;
  group.lockstep = setup.ranks > 1;
  const uint64_t kv_tokens = profile_.kv_capacity_tokens(setup.ranks) / setup.ranks;
  group.engine.kv = {.blocks = static_cast<uint32_t>(kv_tokens / kPressureKvBlock),
                     .block_tokens = kPressureKvBlock,
                     .piece_tokens = 512,
                     .cache = false};
  group.engine.token_budget = kPressureBudget;
  group.engine.max_running = kPressureRunning;
  group.engine.queue.policy = arm.queue;
  sim::ClusterOptions out;
  out.groups = {std::move(group)};
  out.router.engine = arm.engine;
  out.router.fleet.pressure = arm.engine.pressure;
  out.engine_series = true;
  return out;
}

Result<PressureFigures> Grid::run_one(const Job& job) {
  const PressureSetup& setup = out_.setups[job.setup];
  const double rate = setup.highest_rate * out_.loads[job.load];
  std::vector<sim::SimRequest> requests = workload_of(job).requests;
  const std::vector<int32_t>& assigned = assigned_to(job);
  for (size_t i = 0; i < requests.size(); ++i) {
    requests[i].arrival_s /= rate;
    requests[i].assigned = assigned[i];
  }
  const Result<sim::SimResult> result = sim::run_cluster(cluster(setup, out_.arms[job.arm]), requests);
  if (!result) return result.error();
  const sim::Summary summary = sim::summarize(*result);
  const sim::WorkerReport& worker = result->workers.front();
  failed_ += summary.requests - summary.ended[0];
  PressureFigures out{.ttft_s = summary.ttft_s.mean,
                      .ttft_p99_s = summary.ttft_s.p99,
                      .tpot_s = summary.tpot_s.mean,
                      .total_s = summary.total_s.mean,
                      .requests_per_s = summary.requests_per_s,
                      .tokens_per_s = summary.output_tokens_per_s,
                      .gap_tokens_per_s = prompt_gap(worker, requests.front().arrival_s, requests.back().arrival_s),
                      .kv = worker.kv_share_s / worker.here_s,
                      .preemptions = static_cast<double>(worker.preemptions)};
  for (const sim::EngineReport& engine : worker.engines) {
    out.running += engine.running_s / worker.here_s / static_cast<double>(worker.engines.size());
  }
  return out;
}

Result<PressureGrid> Grid::run() {
  std::vector<Job> jobs;
  for (size_t s = 0; s < out_.setups.size(); ++s) {
    for (size_t m = 0; m < out_.mixes.size(); ++m) {
      for (size_t l = 0; l < out_.loads.size(); ++l) {
        for (size_t seed = 0; seed < static_cast<size_t>(out_.seeds); ++seed) {
          for (size_t a = 0; a < out_.arms.size(); ++a) jobs.push_back({s, m, l, seed, a});
        }
      }
    }
  }
  out_.cells.resize(jobs.size());
  Progress progress("simulating", jobs.size());
  std::mutex mutex;  // over progress, error and `done`
  std::optional<Error> error;
  size_t done = 0;
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t at = next++; at < jobs.size(); at = next++) {
      const Job& job = jobs[at];
      const Result<PressureFigures> figures = run_one(job);
      const std::lock_guard lock(mutex);
      if (!figures) {
        error = figures.error();
        next = jobs.size();
        return;
      }
      out_.cells[out_.at(job.setup, job.mix, job.load, job.seed, job.arm)] = *figures;
      progress.set(++done);
    }
  };
  const auto began = std::chrono::steady_clock::now();
  {
    std::vector<std::jthread> threads;
    const size_t cores = std::max(1U, std::thread::hardware_concurrency());
    const size_t wanted = bench_.threads > 0 ? static_cast<size_t>(bench_.threads) : cores;
    for (size_t i = 0; i < wanted; ++i) threads.emplace_back(work);
  }
  if (error) return *error;
  out_.took_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  out_.failed = failed_;
  return std::move(out_);
}

}  // namespace

template <class Visit>
void PressureGrid::visit(const Slice& slice, size_t arm, const Visit& visit) const {
  for (size_t s = 0; s < setups.size(); ++s) {
    for (size_t m = 0; m < mixes.size(); ++m) {
      for (size_t l = 0; l < loads.size(); ++l) {
        if (slice.setup != kAny && slice.setup != s) continue;
        if (slice.mix != kAny && slice.mix != m) continue;
        if (slice.load != kAny && slice.load != l) continue;
        for (size_t seed = 0; seed < static_cast<size_t>(seeds); ++seed) {
          visit(cells[at(s, m, l, seed, arm)], cells[at(s, m, l, seed, 0)]);
        }
      }
    }
  }
}

PressureFigures PressureGrid::mean(const Slice& slice, size_t arm) const {
  PressureFigures out;
  double count = 0;
  visit(slice, arm, [&](PressureFigures cell, const PressureFigures&) {
    const auto sums = out.all();
    const auto values = cell.all();
    for (size_t i = 0; i < sums.size(); ++i) *sums.at(i) += *values.at(i);
    ++count;
  });
  for (double* value : out.all()) *value /= count;
  return out;
}

double PressureGrid::change(const Slice& slice, size_t arm, double PressureFigures::*figure) const {
  double logs = 0, count = 0;
  visit(slice, arm, [&](const PressureFigures& cell, const PressureFigures& first) {
    logs += std::log(cell.*figure / (first.*figure));
    ++count;
  });
  return std::exp(logs / count) - 1;
}

Result<sim::Trace> pressure_lengths(const PressureBench& bench) {
  return sim::read_trace(bench.trace.empty() ? find_root() + "/data/traces/azure_2023_conv.csv.xz" : bench.trace);
}

Result<PressureGrid> run_pressure_grid(const PressureBench& bench, std::vector<PressureArm> arms) {
  Grid grid(bench, std::move(arms));
  if (Status ready = grid.prepare(); !ready) return std::move(ready).error();
  return grid.run();
}

}  // namespace kindred::cli
