#include "reproduce/gimbal_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <mutex>
#include <thread>

namespace kindred::reproduce {
namespace {

constexpr double kFitRate = 4;
constexpr uint64_t kFitSeed = 1000;  // no seed of the grid
constexpr uint64_t kFirstSeed = 1;
constexpr double kFitTolerance = 0.02, kFitLimit = 0.1;
constexpr int kFitSteps = 10, kLengthRounds = 2;

// A dial per law, from the profile as it is (0 or 1) to far beyond.
GimbalLaw law_at(GimbalSlow slow, double lengths, double dial) {
  GimbalLaw law{.lengths = lengths};
  switch (slow) {
    case GimbalSlow::kAll: law.all = dial; break;
    case GimbalSlow::kHost: law.host_layer_us = 100 * (dial - 1); break;
    case GimbalSlow::kExperts: law.experts = dial; break;
    case GimbalSlow::kLinks: law.links = dial; break;
  }
  return law;
}

struct GimbalJob {
  GimbalSetup setup;
  const GimbalWorkload* workload = nullptr;
  GimbalResult about;
};

class GimbalRunner {
 public:
  explicit GimbalRunner(const GimbalOptions& options) : options_(options) {
    if (options_.mixes.empty()) {
      for (const std::string_view name : sim::length_mix_names())
        options_.mixes.push_back(*sim::parse_length_mix(name));
    }
  }
  Result<GimbalReproduction> run();

 private:
  using Workloads = std::vector<GimbalWorkload>;  // of all mixes
  Result<Workloads> draw(const GimbalTrafficOptions& traffic, uint64_t seed) const;
  GimbalTrafficOptions traffic(double lengths) const {
    return {.requests = options_.requests, .lengths = lengths, .domains = options_.domains};
  }
  GimbalSetup setup_of(const GimbalLaw& law) const { return {.profile = options_.profile, .law = law}; }
  GimbalJob job(const GimbalSetup& setup, const GimbalWorkload& workload, double rate, std::string_view arm,
                const std::string& variant = {}) const;

  Status run_jobs(const std::string& what, std::vector<GimbalJob>& jobs);
  Result<GimbalCell> baseline(const GimbalLaw& law, const Workloads& workloads);
  Result<GimbalFit> fit_dial(GimbalSlow slow, double lengths, const Workloads& workloads, double start);
  Result<GimbalFit> fit_all();
  Status main_grid();
  Status scan_laws();
  Status scan_world();
  Status scan(const std::string& name, const GimbalSetup& setup, const Workloads& workloads,
              std::span<const std::string_view> arms);
  Status add(const std::string& what, std::vector<GimbalJob> jobs);

  GimbalOptions options_;
  GimbalReproduction out_;
  Workloads fit_workloads_;
  std::mutex mutex_;
};

Result<GimbalRunner::Workloads> GimbalRunner::draw(const GimbalTrafficOptions& traffic, uint64_t seed) const {
  auto made = GimbalTraffic::make(options_.profile, options_.trace, traffic);
  if (!made) return std::move(made).error();
  Workloads out;
  for (const sim::LengthMix mix : options_.mixes) {
    auto drawn = (*made)->draw(mix, seed);
    if (!drawn) return std::move(drawn).error();
    out.push_back(*std::move(drawn));
  }
  return out;
}

GimbalJob GimbalRunner::job(const GimbalSetup& setup, const GimbalWorkload& workload, double rate, std::string_view arm,
                            const std::string& variant) const {
  GimbalResult about{.arm = std::string(arm), .variant = variant};
  about.mix = workload.mix;
  about.rate = rate;
  about.seed = workload.seed;
  return {.setup = setup, .workload = &workload, .about = std::move(about)};
}

Status GimbalRunner::run_jobs(const std::string& what, std::vector<GimbalJob>& jobs) {
  std::atomic<size_t> next{0};
  size_t done = 0;
  std::optional<Error> error;
  const auto work = [&] {
    for (size_t at = next++; at < jobs.size(); at = next++) {
      GimbalJob& job = jobs[at];
      auto cell = run_gimbal_cell(job.setup, *job.workload, job.about.rate, job.about.arm);
      const std::lock_guard lock(mutex_);
      if (!cell) {
        error = std::move(cell).error();
        next = jobs.size();
        return;
      }
      job.about.cell = *cell;
      if (options_.on_run) options_.on_run(what, ++done, jobs.size());
    }
  };
  std::vector<std::thread> threads;
  for (size_t t = 1; t < options_.threads; ++t) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
  if (error) return *std::move(error);
  return {};
}

Status GimbalRunner::add(const std::string& what, std::vector<GimbalJob> jobs) {
  if (Status ok = run_jobs(what, jobs); !ok) return ok;
  for (GimbalJob& job : jobs) out_.results.push_back(std::move(job.about));
  return {};
}

// The baseline at 4 a second, mean over mixes.
Result<GimbalCell> GimbalRunner::baseline(const GimbalLaw& law, const Workloads& workloads) {
  std::vector<GimbalJob> jobs;
  for (const GimbalWorkload& workload : workloads) jobs.push_back(job(setup_of(law), workload, kFitRate, "vllm"));
  if (Status ok = run_jobs("fitting", jobs); !ok) return std::move(ok).error();
  GimbalCell sum;
  for (GimbalJob& job : jobs) {
    const auto into = sum.all();
    const auto from = job.about.cell.all();
    for (size_t i = 0; i < into.size(); ++i) *into.at(i) += *from.at(i) / static_cast<double>(jobs.size());
  }
  return sum;
}

// Running requests grow with the dial: along the line through the last two tries, in logarithms, until the target is
// between two dials, then by the line between those. The nearest of all tries, however near that is.
Result<GimbalFit> GimbalRunner::fit_dial(GimbalSlow slow, double lengths, const Workloads& workloads, double start) {
  constexpr double kFirstSlope = 2, kLeastSlope = 0.3, kMostSlope = 4;
  struct Tried {
    double log_dial = 0, log_off = 0;
  };
  std::optional<Tried> low, high, last;
  GimbalFit best;
  double best_off = std::numeric_limits<double>::infinity(), dial = start;
  for (int step = 0; step < kFitSteps && best_off >= kFitTolerance; ++step) {
    GimbalFit now{.slow = slow, .law = law_at(slow, lengths, dial)};
    auto cell = baseline(now.law, workloads);
    if (!cell) return std::move(cell).error();
    now.baseline = *cell;
    const double off = now.baseline.running / options_.baseline.running;
    if (std::abs(off - 1) < best_off) {
      best_off = std::abs(off - 1);
      best = now;
    }
    const Tried tried{.log_dial = std::log(dial), .log_off = std::log(off)};
    (off < 1 ? low : high) = tried;
    if (low && high) {
      const double share = std::clamp(low->log_off / (low->log_off - high->log_off), 0.1, 0.9);
      dial = std::exp(std::lerp(low->log_dial, high->log_dial, share));
    } else {
      const double run = last ? tried.log_dial - last->log_dial : 0;
      const double slope = run == 0 ? kFirstSlope : (tried.log_off - last->log_off) / run;
      dial = std::max(1.0, dial * std::exp(-tried.log_off / std::clamp(slope, kLeastSlope, kMostSlope)));
    }
    last = tried;
  }
  return best;
}

// Lengths from the prompts' gap, the dial from running requests, in turn.
Result<GimbalFit> GimbalRunner::fit_all() {
  double lengths = 1.6, dial = 6.5;
  for (int round = 0;; ++round) {
    auto drawn = draw(traffic(lengths), kFitSeed);
    if (!drawn) return std::move(drawn).error();
    fit_workloads_ = *std::move(drawn);
    auto fit = fit_dial(GimbalSlow::kAll, lengths, fit_workloads_, dial);
    if (!fit) return std::move(fit).error();
    if (std::abs(fit->baseline.running / options_.baseline.running - 1) > kFitLimit) {
      return Error{ErrorCode::kInvalid,
                   fmt::format("no law holds {} requests an engine at {} a second; the nearest holds {:.1f}",
                               options_.baseline.running, kFitRate, fit->baseline.running)};
    }
    const double off = fit->baseline.gap_tokens_per_s / options_.baseline.gap_tokens_per_s;
    if (round + 1 == kLengthRounds || std::abs(off - 1) < kFitTolerance) return fit;
    lengths /= off;
    dial = fit->law.all * off;
  }
}

Status GimbalRunner::main_grid() {
  const GimbalSetup setup = setup_of(out_.fits.front().law);
  for (uint64_t seed = kFirstSeed; seed < kFirstSeed + options_.seeds; ++seed) {
    const auto workloads = draw(traffic(setup.law.lengths), seed);
    if (!workloads) return workloads.error();
    std::vector<GimbalJob> jobs;
    for (const GimbalWorkload& workload : *workloads) {
      for (const double rate : options_.rates) {
        for (const std::string_view arm : kGimbalArms) jobs.push_back(job(setup, workload, rate, arm));
      }
    }
    if (Status ok = add(fmt::format("seed {} of {}", seed, options_.seeds), std::move(jobs)); !ok) return ok;
  }
  return {};
}

constexpr std::array<std::string_view, 6> kScanArms = {"vllm", "no-eplb", "dp", "ep", "both", "gimbal"};
constexpr std::array<std::string_view, 3> kPlacementArms = {"vllm", "no-eplb", "ep"};
constexpr std::array kScanMixes = {sim::LengthMix::kRandom, sim::LengthMix::kTwoEnd};

Status GimbalRunner::scan(const std::string& name, const GimbalSetup& setup, const Workloads& workloads,
                          std::span<const std::string_view> arms) {
  out_.variants.push_back(name);
  std::vector<GimbalJob> jobs;
  for (const GimbalWorkload& workload : workloads) {
    for (const std::string_view arm : arms) jobs.push_back(job(setup, workload, kFitRate, arm, name));
  }
  return add(name, std::move(jobs));
}

// The same slowness elsewhere.
Status GimbalRunner::scan_laws() {
  Workloads some;
  for (GimbalWorkload& workload : fit_workloads_) {
    if (std::ranges::count(kScanMixes, workload.mix) > 0) some.push_back(std::move(workload));
  }
  fit_workloads_ = std::move(some);
  for (const auto& [slow, start] : {std::pair(GimbalSlow::kHost, 50.0), std::pair(GimbalSlow::kExperts, 20.0),
                                    std::pair(GimbalSlow::kLinks, 45.0)}) {
    auto fit = fit_dial(slow, out_.fits.front().law.lengths, fit_workloads_, start);
    if (!fit) return std::move(fit).error();
    out_.fits.push_back(*fit);
    const std::string name = fmt::format("slow: {}", to_string(slow));
    if (Status ok = scan(name, setup_of(fit->law), fit_workloads_, kScanArms); !ok) return ok;
  }
  return {};
}

// Another world: experts, sources, windows, what moving costs, how much feedback counts.
Status GimbalRunner::scan_world() {
  const GimbalSetup usual = setup_of(out_.fits.front().law);
  struct Scan {
    std::string name;
    GimbalSetup setup;
    std::span<const std::string_view> arms = kScanArms;
  };
  std::vector<Scan> scans;
  const auto with = [&](const std::string& name, std::span<const std::string_view> arms) -> GimbalSetup& {
    return scans.emplace_back(Scan{.name = name, .setup = usual, .arms = arms}).setup;
  };
  with("as fitted", kScanArms);
  with("moves are free", kScanArms).first_stall_s = 0;
  scans.back().setup.later_stall_s = 0;
  with("windows of 10 s", kScanArms).window_s = 10;
  with("feedback of 1/16", kScanArms).expert_weight /= 16;
  with("a domain, an engine", kPlacementArms).by_domain = 1;
  with("a domain, an engine; links 10 x slower", kPlacementArms).by_domain = 1;
  scans.back().setup.law.links *= 10;
  for (const Scan& one : scans) {
    if (Status ok = scan(one.name, one.setup, fit_workloads_, one.arms); !ok) return ok;
  }
  GimbalTrafficOptions uniform = traffic(usual.law.lengths);
  uniform.skew = 0;
  options_.mixes.assign(kScanMixes.begin(), kScanMixes.end());
  const auto alike = draw(uniform, kFitSeed);
  if (!alike) return alike.error();
  return scan("all experts alike", usual, *alike, kScanArms);
}

Result<GimbalReproduction> GimbalRunner::run() {
  auto fit = fit_all();
  if (!fit) return std::move(fit).error();
  out_.fits.push_back(*fit);
  if (Status ok = main_grid(); !ok) return std::move(ok).error();
  if (options_.scans) {
    if (Status ok = scan_laws(); !ok) return std::move(ok).error();
    if (Status ok = scan_world(); !ok) return std::move(ok).error();
  }
  return std::move(out_);
}

bool within(const GimbalResult& result, const GimbalReproduction::Slice& slice) {
  return result.arm == slice.arm && result.variant == slice.variant && (slice.rate == 0 || result.rate == slice.rate);
}

}  // namespace

std::string_view to_string(GimbalSlow slow) {
  switch (slow) {
    case GimbalSlow::kAll: return "all alike";
    case GimbalSlow::kHost: return "a fixed time a layer";
    case GimbalSlow::kExperts: return "experts' kernels";
    case GimbalSlow::kLinks: return "the exchange between ranks";
  }
  return "?";
}

GimbalCell GimbalReproduction::mean(const Slice& slice) const {
  GimbalCell sum;
  double count = 0;
  for (const GimbalResult& result : results) {
    if (!within(result, slice)) continue;
    ++count;
    GimbalCell cell = result.cell;
    const auto into = sum.all();
    const auto from = cell.all();
    for (size_t i = 0; i < into.size(); ++i) *into.at(i) += *from.at(i);
  }
  for (double* value : sum.all()) *value /= count;
  return sum;
}

double GimbalReproduction::change(const Slice& slice, std::string_view against, double GimbalCell::*figure) const {
  double logs = 0, count = 0;
  for (const GimbalResult& result : results) {
    if (!within(result, slice)) continue;
    const auto other = std::ranges::find_if(results, [&](const GimbalResult& one) {
      return one.arm == against && one.variant == result.variant && one.mix == result.mix && one.rate == result.rate &&
             one.seed == result.seed;
    });
    if (other == results.end()) continue;
    logs += std::log(result.cell.*figure / (other->cell.*figure));
    ++count;
  }
  return count > 0 ? std::exp(logs / count) - 1 : std::numeric_limits<double>::quiet_NaN();
}

Result<GimbalReproduction> run_gimbal(const GimbalOptions& options) { return GimbalRunner(options).run(); }

}  // namespace kindred::reproduce
