#include "reproduce/eldr_cluster.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/rng.h"
#include "sim/cohort_fit.h"
#include "sim/trace_reader.h"

namespace kindred::reproduce {
namespace {

constexpr uint32_t kLeastPrompt = 4, kMostPrompt = 1024;
constexpr uint32_t kMostMixedBatch = 256;
constexpr uint32_t kBlockTokens = 16;
constexpr uint32_t kKvBlocks = 60'000;  // 960,000 tokens: 192 GB, less weights, never fill up
constexpr uint64_t kCalibrationBegins = uint64_t{1} << 40;
constexpr uint32_t kCalibrationTokens = 128;  // of a tape, counted
constexpr double kNoLoadCap = 0;
constexpr float kGateUnits = 1024;  // of a gate sum of 1, where it stands for counts

expert::ExpertShape shape_of(const EldrModel& model) {
  expert::ExpertShape shape;
  shape.layers.resize(model.layers);
  std::iota(shape.layers.begin(), shape.layers.end(), 0U);
  shape.experts = model.experts;
  shape.top_k = model.top_k;
  return shape;
}

std::string decode_policy(std::string_view policy) {
  if (policy == "rr") return "round-robin";
  if (policy == "random") return "random";
  if (policy == "jsq") return "least-loaded";
  if (policy == "p2c") return "power-of-two";
  return "locality-band";  // eldr; domain too, with the domains' means for cohorts and tau 0
}

std::vector<uint32_t> prompt_lengths(size_t requests, Rng& rng) {
  std::vector<uint32_t> out(requests);
  const double low = std::log(kLeastPrompt), high = std::log(kMostPrompt);
  for (uint32_t& length : out) length = static_cast<uint32_t>(std::exp(std::lerp(low, high, rng.uniform())));
  return out;
}

// How many of `workers` each share gets: at least one, the largest remainders first.
std::vector<uint32_t> apportion(std::span<const double> shares, uint32_t workers) {
  std::vector<uint32_t> out(shares.size(), 1);
  for (uint32_t left = workers - static_cast<uint32_t>(shares.size()); left > 0; --left) {
    size_t most = 0;
    for (size_t d = 1; d < shares.size(); ++d) {
      if (shares[d] / out[d] > shares[most] / out[most]) most = d;
    }
    ++out[most];
  }
  return out;
}

}  // namespace

std::vector<double> domain_shares(Workload workload) {
  if (workload == Workload::kTask) return std::vector<double>(4, 0.25);
  // WildChat: English and Chinese are about three quarters of it; the rest, of which nothing was published, falls off.
  return {0.50, 0.25, 0.06, 0.05, 0.04, 0.03, 0.03, 0.02, 0.01, 0.01};
}

Result<std::unique_ptr<EldrTraffic>> EldrTraffic::make(const EldrModel& model, Workload workload,
                                                       const TrafficOptions& options) {
  std::unique_ptr<EldrTraffic> out(new EldrTraffic(model, workload, options));
  sim::SyntheticOptions synthetic = sim::calibrated_synthetic(shape_of(model));
  synthetic.domain_share = domain_shares(workload);
  synthetic.domains.clear();
  for (size_t d = 0; d < synthetic.domain_share.size(); ++d) synthetic.domains.push_back(fmt::format("{}", d));
  synthetic.seed = mix64(options.seed + model.layers * 131 + static_cast<uint64_t>(workload));
  auto process = sim::make_synthetic(synthetic);
  if (!process) return std::move(process).error();
  out->process_ = *std::move(process);
  auto gates = sim::make_synthetic_gates(synthetic);
  if (!gates) return std::move(gates).error();
  out->gates_ = *std::move(gates);
  out->mixed_ = mixed_experts(*out->process_, kMostMixedBatch, options.seed);
  if (Status done = out->calibrate(); !done) return std::move(done).error();
  return out;
}

Status EldrTraffic::calibrate() {
  Rng rng(mix64(options_.seed ^ kCalibrationBegins));
  const std::vector<uint32_t> lengths = prompt_lengths(options_.calibration, rng);
  std::vector<sim::CalibrationRequest> requests;
  for (uint64_t i = 0; i < options_.calibration; ++i) {
    sim::TraceRequest like;
    like.prompt_tokens = lengths[i];
    like.output_tokens = kOutputTokens;
    requests.push_back(
        {.experts = process_->experts(like, kCalibrationBegins + i), .decode_tokens = kCalibrationTokens});
  }
  auto recorded = sim::record_activations(requests);
  if (!recorded) return std::move(recorded).error();
  calibration_ = *std::move(recorded);
  return {};
}

Result<std::vector<sim::SimRequest>> EldrTraffic::draw(uint32_t rate, Experts experts, uint32_t prompts) {
  sim::ArrivalOptions arrivals;
  arrivals.requests = static_cast<uint64_t>(rate * options_.seconds);
  arrivals.rate_per_s = rate;
  arrivals.seed = options_.seed + rate;
  auto trace = sim::draw_arrivals(arrivals);
  if (!trace) return std::move(trace).error();
  Rng rng(mix64(options_.seed ^ rate));
  const std::vector<uint32_t> lengths = prompt_lengths(trace->requests.size(), rng);
  std::vector<sim::SimRequest> out;
  for (size_t i = 0; i < trace->requests.size(); ++i) {
    sim::TraceRequest& given = trace->requests[i];
    const size_t prompt = prompts > 0 ? i % prompts : i;
    given.prompt_tokens = lengths[prompt];
    out.push_back({.arrival_s = given.arrival_s,
                   .prompt_tokens = given.prompt_tokens,
                   .output_tokens = kOutputTokens,
                   .blocks = {},
                   .experts = process_->experts(given, prompt),
                   .label = {}});
    if (prompts > 0) out.back().blocks.assign(given.prompt_tokens / kPrefixTokens, prompt + 1);
    if (experts == Experts::kGates) {
      auto sums = std::make_shared<expert::ExpertCounts>(*out.back().experts.prompt);
      const std::vector<float> gates = gates_->prompt_gates(given, prompt);
      for (size_t c = 0; c < gates.size(); ++c)
        sums->data[c] = static_cast<uint32_t>(std::lround(kGateUnits * gates[c]));
      out.back().experts.prompt = std::move(sums);
    }
  }
  if (experts != Experts::kShuffled) return out;
  // What is decoded is another request's; what prefill shows stays.
  for (size_t i = out.size(); i > 1; --i) {
    sim::RequestExperts& one = out[i - 1].experts;
    sim::RequestExperts& other = out[rng.below(i)].experts;
    std::swap(one.decode, other.decode);
    std::swap(one.first, other.first);
  }
  return out;
}

Result<std::shared_ptr<const expert::CohortModel>> EldrTraffic::cohorts(Cohorts kind, uint32_t workers) const {
  expert::FitOptions options;
  options.workers = workers;
  options.seed = options_.seed;
  if (kind == Cohorts::kVanilla) options.balance = expert::Balance::kNone;
  if (kind == Cohorts::kGates) return gate_cohorts(options);
  auto fitted = expert::fit_cohorts(calibration_, options);
  if (!fitted) return std::move(fitted).error();
  if (kind == Cohorts::kDomains) return domain_cohorts(fitted->model, workers);
  return std::make_shared<const expert::CohortModel>(std::move(fitted->model));
}

Result<std::shared_ptr<const expert::CohortModel>> EldrTraffic::gate_cohorts(expert::FitOptions options) const {
  options.transform = expert::Transform::kGate;
  expert::Activations gated = calibration_;
  for (uint64_t i = 0; i < gated.requests(); ++i) {
    sim::TraceRequest like;
    like.prompt_tokens = gated.prompt_tokens[i];
    const std::vector<float> gates = gates_->prompt_gates(like, kCalibrationBegins + i);
    gated.prefill_gate.insert(gated.prefill_gate.end(), gates.begin(), gates.end());
  }
  auto fitted = expert::fit_cohorts(gated, options);
  if (!fitted) return std::move(fitted).error();
  expert::CohortData data = fitted->model.data();
  data.transform = expert::Transform::kCount;  // requests report the sums in place of counts
  auto made = expert::CohortModel::make(std::move(data));
  if (!made) return std::move(made).error();
  return std::make_shared<const expert::CohortModel>(*std::move(made));
}

Result<std::shared_ptr<const expert::CohortModel>> EldrTraffic::domain_cohorts(const expert::CohortModel& fitted,
                                                                               uint32_t workers) const {
  const std::vector<double> shares = domain_shares(workload_);
  const size_t dims = fitted.dims();
  std::vector<std::vector<double>> sums(shares.size(), std::vector<double>(dims, 0));
  for (size_t i = 0; i < calibration_.requests(); ++i) {
    expert::ExpertCounts counts(calibration_.shape);
    counts.tokens = calibration_.prompt_tokens[i];
    counts.data.assign(calibration_.prefill(i).begin(), calibration_.prefill(i).end());
    expert::Signature signature;
    if (fitted.signature(counts, signature) != expert::SignatureProblem::kNone) continue;
    std::vector<double>& sum = sums.at(std::stoul(calibration_.domains[i]));
    for (size_t d = 0; d < dims; ++d) sum[d] += signature[d];
  }
  expert::CohortData data = fitted.data();
  data.centroids.clear();
  const std::vector<uint32_t> rows = apportion(shares, workers);
  for (size_t domain = 0; domain < shares.size(); ++domain) {
    double norm = 0;
    for (const double value : sums[domain]) norm += value * value;
    for (uint32_t row = 0; row < rows[domain]; ++row) {
      for (const double value : sums[domain]) data.centroids.push_back(static_cast<float>(value / std::sqrt(norm)));
    }
  }
  auto made = expert::CohortModel::make(std::move(data));
  if (!made) return std::move(made).error();
  return std::make_shared<const expert::CohortModel>(*std::move(made));
}

Result<Cell> run_cell(std::span<const sim::SimRequest> requests, std::shared_ptr<const sim::StepCost> cost,
                      const CellOptions& options) {
  sim::ClusterOptions cluster;
  const auto group = [&](const char* name, Role role, uint32_t count) {
    sim::WorkerGroup out{.name = name, .role = role, .count = count, .cost = cost};
    out.ranks = role == Role::kDecode ? options.ranks : 1;
    out.engine.kv = {.blocks = kKvBlocks,
                     .block_tokens = kBlockTokens,
                     .piece_tokens = kPrefixTokens,
                     .cache = options.prefix_cache && role == Role::kPrefill};
    out.engine.max_running = 1024;
    return out;
  };
  cluster.groups = {group("prefill", Role::kPrefill, options.prefill_workers),
                    group("decode", Role::kDecode, options.decode_workers)};
  cluster.router.decode.name = decode_policy(options.policy);
  cluster.router.decode.tau = options.policy == "domain" ? 0 : options.tau;
  cluster.router.decode.load_cap = kNoLoadCap;
  cluster.router.decode.seed = cluster.router.prefill.seed = options.seed;
  // Where no prompt comes twice, a hash of it would be as good as chance; with a cache there is one prefill worker.
  cluster.router.prefill.name = "least-loaded";
  cluster.router.cohorts = options.cohorts;
  const Result<sim::SimResult> run = sim::run_cluster(cluster, requests);
  if (!run) return run.error();
  const sim::Summary summary = sim::summarize(*run);
  return Cell{.tpot50_ms = 1e3 * summary.tpot_s.p50,
              .tpot99_ms = 1e3 * summary.tpot_s.p99,
              .ttft50_ms = 1e3 * summary.ttft_s.p50,
              .batch = summary.decode_batch,
              .experts = summary.active_experts,
              .worst_experts = summary.worst_rank_experts};
}

}  // namespace kindred::reproduce
