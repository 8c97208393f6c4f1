#include "reproduce/eldr_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>

namespace kindred::reproduce {
namespace {

// Of a prompt's token: 3.3 to 5.1 billion active parameters, two operations each, at 35 % of an MI300X's peak in 16
// bits. An assumption; eager kernels' fixed time is most of a prefill.
constexpr double kPrefillTokenUs = 20;
constexpr uint32_t kVariantRate = 60;  // of the published ablations
// Of the published runs with prefix caches.
constexpr std::string_view kCacheModel = "gptoss";
constexpr uint32_t kCacheRate = 100, kCachePrompts = 2000, kCachePrefillWorkers = 1;
constexpr std::string_view kLargeFrom = "qwen";  // of the same family

struct Job {
  Predicted about;
  CellOptions options;
  std::shared_ptr<const sim::StepCost> cost;
};

class EldrRunner {
 public:
  explicit EldrRunner(const EldrOptions& options) : options_(options) {}
  Result<EldrReproduction> run();

 private:
  struct Traffics {
    std::array<std::unique_ptr<EldrTraffic>, 2> of;
    std::array<std::vector<double>, 2> mixed;
  };
  Status fit(const EldrModel& model, std::span<const EldrRow> round_robin, Traffics& out);
  Status run_model(const EldrModel& model, Traffics& traffics);
  Status run_workload(EldrTraffic& traffic, std::shared_ptr<const sim::StepCost> cost);
  std::vector<Job> main_jobs(const EldrTraffic& traffic, uint32_t rate, std::shared_ptr<const sim::StepCost> cost);
  void add_variants(const Job& eldr, std::vector<Job>& jobs);
  void add_scaling(const Job& rr, const Job& eldr, std::vector<Job>& jobs);
  Status run_other_experts(EldrTraffic& traffic, const Job& rr, const Job& eldr);
  Status run_cache(EldrTraffic& traffic, const Job& rr, const Job& eldr);
  Status run_large(const EldrModel& from);
  bool runs_cache(const EldrModel& model) const;
  bool runs_large(const EldrModel& model) const { return options_.large && model.key == kLargeFrom; }
  Status run_jobs(std::span<const sim::SimRequest> requests, std::vector<Job> jobs);
  size_t cells_of(const EldrModel& model) const;

  using Cohorts = std::shared_ptr<const expert::CohortModel>;
  struct CohortSet {
    Cohorts balanced = {}, vanilla = {}, domains = {}, gates = {}, of_8 = {}, of_24 = {};
  };
  Status make_cohorts(const EldrTraffic& traffic);

  EldrOptions options_;
  EldrReproduction out_;
  CohortSet cohorts_;  // of the workload that runs
  std::mutex mutex_;
  size_t done_ = 0, total_ = 0;
};

// Works through `jobs` on the requests of one rate.
Status EldrRunner::run_jobs(std::span<const sim::SimRequest> requests, std::vector<Job> jobs) {
  std::atomic<size_t> next{0};
  std::vector<Result<Cell>> results(jobs.size(), Result<Cell>(Cell{}));
  const auto work = [&] {
    for (size_t at = next++; at < jobs.size(); at = next++) {
      results[at] = run_cell(requests, jobs[at].cost, jobs[at].options);
      const std::lock_guard lock(mutex_);
      if (options_.on_cell) options_.on_cell(++done_, total_);
    }
  };
  std::vector<std::thread> threads;
  for (size_t t = 1; t < options_.threads; ++t) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 0; i < jobs.size(); ++i) {
    if (!results[i]) return results[i].error();
    jobs[i].about.cell = *results[i];
    out_.cells.push_back(std::move(jobs[i].about));
  }
  return {};
}

Status EldrRunner::make_cohorts(const EldrTraffic& traffic) {
  using Kind = EldrTraffic::Cohorts;
  const auto make = [&](Kind kind, uint32_t workers, Cohorts& out) -> Status {
    auto made = traffic.cohorts(kind, workers);
    if (!made) return std::move(made).error();
    out = *std::move(made);
    return {};
  };
  cohorts_ = {};
  if (Status ok = make(Kind::kBalanced, kDecodeWorkers, cohorts_.balanced); !ok) return ok;
  if (Status ok = make(Kind::kVanilla, kDecodeWorkers, cohorts_.vanilla); !ok) return ok;
  if (options_.scaling) {
    if (Status ok = make(Kind::kBalanced, 8, cohorts_.of_8); !ok) return ok;
    if (Status ok = make(Kind::kBalanced, 24, cohorts_.of_24); !ok) return ok;
  }
  if (options_.gates) {
    if (Status ok = make(Kind::kGates, kDecodeWorkers, cohorts_.gates); !ok) return ok;
  }
  return make(Kind::kDomains, kDecodeWorkers, cohorts_.domains);
}

std::vector<Job> EldrRunner::main_jobs(const EldrTraffic& traffic, uint32_t rate,
                                       std::shared_ptr<const sim::StepCost> cost) {
  std::vector<Job> jobs;
  for (const std::string_view policy : kEldrPolicies) {
    Job job{.about = {}, .options = {}, .cost = cost};
    job.about.workload = traffic.workload();
    job.about.model = traffic.model().key;
    job.about.policy = job.options.policy = policy;
    job.about.rate = rate;
    job.options.seed = options_.seed;
    if (policy == "eldr") job.options.cohorts = cohorts_.balanced;
    if (policy == "domain") job.options.cohorts = cohorts_.domains;
    jobs.push_back(std::move(job));
  }
  return jobs;
}

void EldrRunner::add_variants(const Job& eldr, std::vector<Job>& jobs) {
  for (const double tau : {0.0, 0.2, 0.3}) {
    Job& job = jobs.emplace_back(eldr);
    job.options.tau = tau;
    job.about.variant = fmt::format("tau {}", tau);
  }
  Job& vanilla = jobs.emplace_back(eldr);
  vanilla.options.cohorts = cohorts_.vanilla;
  vanilla.about.variant = "vanilla";
}

void EldrRunner::add_scaling(const Job& rr, const Job& eldr, std::vector<Job>& jobs) {
  for (const auto& [workers, cohorts] : {std::pair(8U, cohorts_.of_8), std::pair(24U, cohorts_.of_24)}) {
    for (Job job : {rr, eldr}) {
      job.options.decode_workers = workers;
      if (job.options.cohorts) job.options.cohorts = cohorts;
      job.about.variant = fmt::format("{}D", workers);
      jobs.push_back(std::move(job));
    }
  }
}

Status EldrRunner::run_workload(EldrTraffic& traffic, std::shared_ptr<const sim::StepCost> cost) {
  if (Status ok = make_cohorts(traffic); !ok) return ok;
  for (const uint32_t rate : options_.rates) {
    auto requests = traffic.draw(rate);
    if (!requests) return std::move(requests).error();
    std::vector<Job> jobs = main_jobs(traffic, rate, cost);
    const Job rr = jobs.front(), eldr = jobs.back();
    if (rate == kVariantRate) add_variants(eldr, jobs);
    if (options_.scaling) add_scaling(rr, eldr, jobs);
    if (Status ok = run_jobs(*requests, std::move(jobs)); !ok) return ok;
    requests->clear();
    if (rate == kVariantRate) {
      if (Status ok = run_other_experts(traffic, rr, eldr); !ok) return ok;
    }
    if (rate == kCacheRate && traffic.workload() == Workload::kTask && runs_cache(traffic.model())) {
      if (Status ok = run_cache(traffic, rr, eldr); !ok) return ok;
    }
  }
  return {};
}

Status EldrRunner::run_other_experts(EldrTraffic& traffic, const Job& rr, const Job& eldr) {
  auto requests = traffic.draw(kVariantRate, EldrTraffic::Experts::kShuffled);
  if (!requests) return std::move(requests).error();
  std::vector<Job> check = {rr, eldr};
  for (Job& job : check) job.about.variant = "shuffled";
  if (Status ok = run_jobs(*requests, std::move(check)); !ok || !options_.gates) return ok;
  requests->clear();
  requests = traffic.draw(kVariantRate, EldrTraffic::Experts::kGates);
  if (!requests) return std::move(requests).error();
  Job gate = eldr;
  gate.options.cohorts = cohorts_.gates;
  gate.about.variant = "gate";
  return run_jobs(*requests, {gate});
}

Status EldrRunner::run_cache(EldrTraffic& traffic, const Job& rr, const Job& eldr) {
  auto requests = traffic.draw(kCacheRate, EldrTraffic::Experts::kOwn, kCachePrompts);
  if (!requests) return std::move(requests).error();
  std::vector<Job> jobs;
  for (const bool cache : {false, true}) {
    for (Job job : {rr, eldr}) {
      job.options.prefill_workers = kCachePrefillWorkers;
      job.options.prefix_cache = cache;
      job.about.variant = cache ? "cache on" : "cache off";
      jobs.push_back(std::move(job));
    }
  }
  return run_jobs(*requests, std::move(jobs));
}

bool EldrRunner::runs_cache(const EldrModel& model) const {
  return model.key == kCacheModel && std::ranges::count(options_.rates, kCacheRate) > 0;
}

Status EldrRunner::run_large(const EldrModel& from) {
  const EldrModelFit& fit = out_.fits.back();
  const auto cost = std::make_shared<const EldrCost>(large_law(from, fit.fit.law), large_law(from, fit.prefill));
  auto made =
      EldrTraffic::make(large_model(), Workload::kLanguage,
                        {.seconds = options_.seconds, .calibration = options_.calibration, .seed = options_.seed});
  if (!made) return std::move(made).error();
  EldrTraffic& traffic = **made;
  auto cohorts = traffic.cohorts(EldrTraffic::Cohorts::kBalanced, kLargeDecodeWorkers);
  if (!cohorts) return std::move(cohorts).error();
  for (const uint32_t rate : kLargeRates) {
    auto requests = traffic.draw(rate);
    if (!requests) return std::move(requests).error();
    const std::vector<Job> all = main_jobs(traffic, rate, cost);
    std::vector<Job> jobs = {all.front(), all.back()};
    for (Job& job : jobs) {
      job.options.prefill_workers = kLargePrefillWorkers;
      job.options.decode_workers = kLargeDecodeWorkers;
      job.options.ranks = kLargeRanks;
    }
    jobs.back().options.cohorts = *cohorts;
    if (Status ok = run_jobs(*requests, std::move(jobs)); !ok) return ok;
  }
  return {};
}

Status EldrRunner::fit(const EldrModel& model, std::span<const EldrRow> round_robin, Traffics& out) {
  for (const Workload workload : kWorkloads) {
    auto made = EldrTraffic::make(
        model, workload, {.seconds = options_.seconds, .calibration = options_.calibration, .seed = options_.seed});
    if (!made) return std::move(made).error();
    const auto at = static_cast<size_t>(workload);
    out.mixed.at(at) = (*made)->mixed();
    out.of.at(at) = *std::move(made);
  }
  auto law = fit_law(model, round_robin, out.mixed);
  if (!law) return std::move(law).error();
  EldrModelFit fit{.model = model.key, .fit = *std::move(law), .prefill = {.fixed_ms = 0, .token_us = kPrefillTokenUs}};
  // At the lowest rate hardly any prompt waits for another.
  double ttft_ms = 0, rows = 0;
  for (const EldrRow& row : round_robin) {
    if (row.model != model.key || row.rate != kEldrRates.front()) continue;
    ttft_ms += row.ttft50_ms;
    ++rows;
  }
  constexpr double kMedianPrompt = 64;  // of 4 to 1024, log-evenly
  fit.prefill.fixed_ms = ttft_ms / rows - 1e-3 * kPrefillTokenUs * kMedianPrompt;
  out_.fits.push_back(std::move(fit));
  return {};
}

Status EldrRunner::run_model(const EldrModel& model, Traffics& traffics) {
  const EldrModelFit& fit = out_.fits.back();
  const auto cost = std::make_shared<const EldrCost>(fit.fit.law, fit.prefill);
  for (const auto& traffic : traffics.of) {
    if (Status ok = run_workload(*traffic, cost); !ok) return ok;
  }
  // Blind: the first model's law, for this one.
  const EldrModelFit& from = out_.fits.front();
  if (from.model == model.key) return {};
  DecodeLaw law = from.fit.law;
  const auto& from_model = *std::ranges::find(eldr_models(), from.model, &EldrModel::key);
  const double layers = double{1} * model.layers / from_model.layers;
  law.fixed_ms *= layers;
  law.token_us *= layers;
  law.expert_us = fit.fit.law.expert_us;  // of the hardware, not of any row
  const auto blind = std::make_shared<const EldrCost>(law, fit.prefill);
  EldrTraffic& task = *traffics.of[0];
  auto balanced = task.cohorts(EldrTraffic::Cohorts::kBalanced, kDecodeWorkers);
  if (!balanced) return std::move(balanced).error();
  cohorts_ = {.balanced = *std::move(balanced)};
  for (const uint32_t rate : options_.rates) {
    auto requests = task.draw(rate);
    if (!requests) return std::move(requests).error();
    const std::vector<Job> all = main_jobs(task, rate, blind);
    std::vector<Job> jobs = {all.front(), all.back()};
    for (Job& job : jobs) job.about.variant = "by " + from.model;
    if (Status ok = run_jobs(*requests, std::move(jobs)); !ok) return ok;
  }
  return {};
}

size_t EldrRunner::cells_of(const EldrModel& model) const {
  const bool first = options_.models.empty() ? model.key == eldr_models().front().key : model.key == options_.models[0];
  const bool varies = std::ranges::find(options_.rates, kVariantRate) != options_.rates.end();
  const size_t rates = options_.rates.size();
  const size_t varied = 6 + (options_.gates ? 1 : 0);
  const size_t scaled = options_.scaling ? 4 : 0;  // two settings, two policies
  return rates * 2 * (kEldrPolicies.size() + scaled) + (varies ? 2 * varied : 0) + (first ? 0 : 2 * rates) +
         (runs_cache(model) ? 4 : 0) + (runs_large(model) ? 2 * kLargeRates.size() : 0);
}

Result<EldrReproduction> EldrRunner::run() {
  auto rows = read_eldr_main(options_.folder);
  if (!rows) return std::move(rows).error();
  const std::vector<EldrRow> round_robin = round_robin_rows(*rows);
  rows->clear();  // nothing of what is predicted is here while it is
  std::vector<EldrModel> models;
  for (const EldrModel& model : eldr_models()) {
    if (options_.models.empty() || std::ranges::count(options_.models, model.key) > 0) models.push_back(model);
  }
  for (const EldrModel& model : models) total_ += cells_of(model);
  for (const EldrModel& model : models) {
    Traffics traffics;
    if (Status ok = fit(model, round_robin, traffics); !ok) return ok.error();
    if (Status ok = run_model(model, traffics); !ok) return ok.error();
    traffics = {};
    if (runs_large(model)) {
      if (Status ok = run_large(model); !ok) return ok.error();
    }
  }
  return std::move(out_);
}

}  // namespace

Result<EldrReproduction> run_eldr(const EldrOptions& options) { return EldrRunner(options).run(); }

const Predicted* find_cell(std::span<const Predicted> cells, Workload workload, std::string_view model,
                           std::string_view policy, uint32_t rate, std::string_view variant) {
  const auto found = std::ranges::find_if(cells, [&](const Predicted& cell) {
    return cell.workload == workload && cell.model == model && cell.policy == policy && cell.rate == rate &&
           cell.variant == variant;
  });
  return found == cells.end() ? nullptr : &*found;
}

}  // namespace kindred::reproduce
