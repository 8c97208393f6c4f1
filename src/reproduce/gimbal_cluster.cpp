#include "reproduce/gimbal_cluster.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/rng.h"
#include "place/solve.h"
#include "sim/rank_flow.h"
#include "sim/summary.h"
#include "sim/tensor_parallel.h"
#include "sim/trace_reader.h"

namespace kindred::reproduce {
namespace {

constexpr uint32_t kTokenBudget = 8192, kMostRunning = 256;  // vLLM's defaults on an H100
constexpr uint32_t kGimbalBlockTokens = 16;
constexpr uint64_t kProfiled = uint64_t{1} << 40;  // seeds of traffic that offline placements have seen
constexpr uint32_t kProfiledRequests = 400;
constexpr double kLogInterval_s = 10;  // vLLM's

// A step of the test bed: the profile's, slowed down as the law says.
class GimbalCost final : public sim::StepCost {
 public:
  GimbalCost(sim::Profile profile, const GimbalLaw& law)
      : all_(law.all), cost_(slowed(std::move(profile), law), {.tensor = kGimbalTensor}) {}
  double step_s(const sim::StepShape& shape) const override { return all_ * cost_.step_s(shape); }
  double kv_transfer_s(double) const override { return 0; }

 private:
  static sim::Profile slowed(sim::Profile profile, const GimbalLaw& law) {
    profile.host.layer_us += law.host_layer_us;
    sim::MoeFigures& moe = profile.moe;
    for (double* figure : {&moe.a_us, &moe.b_us, &moe.token_us}) *figure *= law.experts;
    for (sim::MoeBlock& block : moe.blocks) block.tile_us *= law.experts;
    sim::AllToAllFigures& links = profile.all_to_all;
    links.dispatch_us *= law.links;
    links.combine_us *= law.links;
    links.dispatch_bytes_per_us /= law.links;
    links.combine_bytes_per_us /= law.links;
    return profile;
  }

  double all_;
  sim::TensorParallelCost cost_;
};

expert::ExpertShape shape_of_profile(const sim::Profile& profile) {
  expert::ExpertShape shape;
  shape.layers.resize(profile.dims.moe_layers);
  std::iota(shape.layers.begin(), shape.layers.end(), 0U);
  shape.experts = profile.dims.experts;
  shape.top_k = profile.dims.top_k;
  return shape;
}

// Copies of all tokens of these requests by source, [L, S, E]; a generated token stands for those like it.
place::Traffic traffic_of(std::span<const sim::SimRequest> requests, std::span<const uint32_t> source,
                          uint32_t sources) {
  constexpr uint32_t kTokensSeen = 16;  // of a request's tape
  const expert::ExpertShape& shape = requests[0].experts.prompt->shape;
  const auto layers = static_cast<uint32_t>(shape.layers.size());
  sim::RankFlow flow(layers, shape.experts, sources, 1);
  flow.begin();
  place::Traffic out;
  for (size_t i = 0; i < requests.size(); ++i) {
    const sim::RequestExperts& uses = requests[i].experts;
    flow.add_chunk(source[i], *uses.prompt, requests[i].prompt_tokens);
    for (uint32_t t = 0; t < kTokensSeen; ++t) {
      flow.add_token(source[i], uses.decode->token((uses.first + t * 7) % uses.decode->tokens()));
    }
  }
  flow.count();
  return flow.take_window();
}

place::Problem problem_of(place::Traffic traffic) {
  place::Problem problem;
  auto topology = place::tiered_topology(traffic.sources, kGimbalRanks);
  KINDRED_CHECK(topology.ok());
  problem.topology = *std::move(topology);
  problem.traffic = std::move(traffic);
  return problem;
}

// From an expert to one of the next layer, as if a domain's tokens chose them independently.
std::vector<float> transitions_of(const place::Traffic& by_domain) {
  const size_t experts = by_domain.experts;
  std::vector<float> out((by_domain.layers - 1) * experts * experts, 0);
  for (size_t l = 0; l + 1 < by_domain.layers; ++l) {
    for (size_t d = 0; d < by_domain.sources; ++d) {
      const auto here = by_domain.layer(l).subspan(d * experts, experts);
      const auto next = by_domain.layer(l + 1).subspan(d * experts, experts);
      const double sum = std::accumulate(here.begin(), here.end(), 0.0);
      if (sum == 0) continue;
      for (size_t e = 0; e < experts; ++e) {
        for (size_t f = 0; f < experts; ++f)
          out[(l * experts + e) * experts + f] += static_cast<float>(here[e] * next[f] / sum);
      }
    }
  }
  return out;
}

Result<std::shared_ptr<const place::Placement>> placed(const place::Problem& problem, place::Solver solver) {
  auto solved = place::solve(problem, solver);
  if (!solved) return std::move(solved).error();
  return std::make_shared<const place::Placement>(std::move(solved->placement));
}

// Each request to the engine whose ranks hold more of its experts than is usual, as many to each; who has most to gain
// chooses first.
std::vector<uint32_t> nearest_engines(std::span<const sim::SimRequest> requests, const place::Placement& placement) {
  std::vector<double> gain(requests.size(), 0);
  for (size_t i = 0; i < requests.size(); ++i) {
    const std::vector<uint32_t>& counts = requests[i].experts.prompt->data;
    double on_first = 0, all = 0;
    for (size_t cell = 0; cell < counts.size(); ++cell) {
      all += counts[cell];
      if (placement.rank[cell] < kGimbalRanks / kGimbalEngines) on_first += counts[cell];
    }
    gain[i] = all > 0 ? on_first / all : 0.5;
  }
  std::vector<uint32_t> order(requests.size()), out(requests.size(), 1);
  std::iota(order.begin(), order.end(), 0U);
  std::ranges::stable_sort(order, [&](uint32_t a, uint32_t b) { return gain[a] > gain[b]; });
  for (size_t i = 0; i < order.size() / kGimbalEngines; ++i) out[order[i]] = 0;
  return out;
}

// Placement and assignment in turn, from domains dealt to engines on.
Result<std::shared_ptr<const place::Placement>> sem_moe_placement(std::span<const sim::SimRequest> profiled) {
  constexpr int kRounds = 3;
  std::vector<uint32_t> source;
  for (const sim::SimRequest& request : profiled) source.push_back(request.experts.domain % kGimbalEngines);
  std::shared_ptr<const place::Placement> out;
  for (int round = 0; round < kRounds; ++round) {
    auto next = placed(problem_of(traffic_of(profiled, source, kGimbalEngines)), place::Solver::kSemMoe);
    if (!next) return next;
    out = *std::move(next);
    source = nearest_engines(profiled, *out);
  }
  return out;
}

Result<std::shared_ptr<const place::Placement>> moetuner_placement(std::span<const sim::SimRequest> profiled,
                                                                   uint32_t domains) {
  std::vector<uint32_t> domain, source;
  for (const sim::SimRequest& request : profiled) {
    domain.push_back(request.experts.domain);
    source.push_back(static_cast<uint32_t>(source.size() % kGimbalEngines));
  }
  place::Problem problem = problem_of(traffic_of(profiled, source, kGimbalEngines));
  problem.transitions = transitions_of(traffic_of(profiled, domain, domains));
  return placed(problem, place::Solver::kMoetuner);
}

struct Arm {
  std::string_view engine = "request-count";
  bool sjf = false, feedback = false;
  std::optional<place::Solver> solver = {};
  place::Weights weights = {};
  bool hysteresis = false;
};

std::optional<Arm> arm_of_name(std::string_view name) {
  constexpr place::Weights kUncalibrated = {.alpha = 1, .beta = 1, .gamma = 0};
  if (name == "vllm") return Arm{.solver = place::Solver::kEplb};
  if (name == "no-eplb" || name == "moetuner") return Arm{};
  if (name == "sem-moe") return Arm{.engine = "replay"};
  if (name == "dp") return Arm{.engine = "pressure", .sjf = true, .solver = place::Solver::kEplb};
  if (name == "ep") return Arm{.solver = place::Solver::kGreedy};
  if (name == "both") return Arm{.engine = "pressure", .sjf = true, .solver = place::Solver::kGreedy};
  if (name == "gimbal")
    return Arm{.engine = "pressure", .sjf = true, .feedback = true, .solver = place::Solver::kGreedy};
  if (name == "uncalibrated") {
    return Arm{.engine = "pressure",
               .sjf = true,
               .feedback = true,
               .solver = place::Solver::kGreedy,
               .weights = kUncalibrated};
  }
  if (name == "kindred") {
    return Arm{.engine = "pressure", .feedback = true, .solver = place::Solver::kFlow, .hysteresis = true};
  }
  if (name == "kindred-dp") return Arm{.engine = "pressure"};
  if (name == "kindred-ep") return Arm{.solver = place::Solver::kFlow, .hysteresis = true};
  if (name == "kindred-both") return Arm{.engine = "pressure", .solver = place::Solver::kFlow, .hysteresis = true};
  return std::nullopt;
}

// Whether request `i` is bound to its domain's engine; the same ones for all arms.
bool is_bound(const GimbalWorkload& workload, uint64_t i, double share) { return uniform_at(workload.seed, i) < share; }

sim::ClusterOptions cluster_of(const GimbalSetup& setup, const GimbalWorkload& workload, std::string_view name,
                               const Arm& arm) {
  sim::WorkerGroup group;
  group.name = "gimbal";
  group.cost = std::make_shared<GimbalCost>(setup.profile, setup.law);
  group.engines = kGimbalEngines;
  group.ranks = kGimbalRanks;
  const uint64_t kv_tokens = sim::engine_kv_tokens(setup.profile, kGimbalEngines, kGimbalTensor);
  group.engine.kv = {.blocks = static_cast<uint32_t>(kv_tokens / kGimbalBlockTokens),
                     .block_tokens = kGimbalBlockTokens,
                     .piece_tokens = 512,
                     .cache = false};
  group.engine.token_budget = kTokenBudget;
  group.engine.max_running = kMostRunning;
  if (arm.sjf) group.engine.queue.policy = policy::QueuePolicy::kSjfAging;
  sim::ExpertParallel& experts = group.expert_parallel.emplace();
  experts.feedback = arm.feedback;
  if (name == "moetuner") experts.at_first = workload.moetuner;
  if (name == "sem-moe") experts.at_first = workload.sem_moe;
  if (arm.solver) {
    sim::PlacementControlOptions& control = experts.control.emplace();
    control.rebalance.solver = *arm.solver;
    control.weights = arm.weights;
    control.hysteresis = arm.hysteresis;
    control.window_s = setup.window_s;
    control.first_stall_s = setup.first_stall_s;
    control.later_stall_s = setup.later_stall_s;
  }
  sim::ClusterOptions out;
  out.groups = {std::move(group)};
  out.router.engine = policy::EnginePolicyOptions{.name = std::string(arm.engine)};
  out.router.engine->pressure.experts = arm.feedback;
  out.router.engine->pressure.expert_weight = setup.expert_weight;
  out.router.fleet.pressure = out.router.engine->pressure;
  out.engine_series = true;
  return out;
}

double log_gap(const sim::WorkerReport& worker, double first_s, double last_s) {
  const auto interval = static_cast<size_t>(kLogInterval_s);
  const auto begin = static_cast<size_t>(first_s) / interval, end = static_cast<size_t>(last_s) / interval + 1;
  double sum = 0;
  for (size_t at = begin; at < end; ++at) {
    std::array<double, kGimbalEngines> tokens{};
    for (size_t e = 0; e < kGimbalEngines; ++e) {
      const auto& by_s = worker.engines[e].prompt_tokens_by_s;
      for (size_t s = at * interval; s < std::min((at + 1) * interval, by_s.size()); ++s) tokens[e] += by_s[s];
    }
    sum += std::abs(tokens[0] - tokens[1]) / kLogInterval_s;
  }
  return sum / static_cast<double>(end - begin);
}

}  // namespace

Result<std::unique_ptr<GimbalTraffic>> GimbalTraffic::make(const sim::Profile& profile, const sim::Trace& trace,
                                                           const GimbalTrafficOptions& options) {
  sim::SyntheticOptions synthetic = sim::calibrated_synthetic(shape_of_profile(profile));
  for (double* deviation :
       {&synthetic.base, &synthetic.domain, &synthetic.request, &synthetic.drift, &synthetic.phase}) {
    *deviation *= options.skew;
  }
  synthetic.domains.clear();
  for (uint32_t d = 0; d < options.domains; ++d) synthetic.domains.push_back(fmt::format("domain-{}", d));
  auto process = sim::make_synthetic(synthetic);
  if (!process) return std::move(process).error();
  std::unique_ptr<GimbalTraffic> out(new GimbalTraffic(trace, options));
  out->process_ = *std::move(process);
  return out;
}

Result<std::vector<sim::SimRequest>> GimbalTraffic::requests(sim::LengthMix mix, uint64_t seed, uint32_t count) {
  Result<std::vector<sim::TraceRequest>> lengths =
      sim::reshape(trace_.requests, {.mix = mix, .requests = count, .seed = seed});
  if (!lengths) return std::move(lengths).error();
  Result<sim::Trace> arrivals = sim::draw_arrivals({.requests = count, .rate_per_s = 1, .seed = seed});
  if (!arrivals) return std::move(arrivals).error();
  std::vector<sim::SimRequest> out;
  for (uint32_t i = 0; i < count; ++i) {
    sim::TraceRequest& given = (*lengths)[i];
    for (uint32_t* tokens : {&given.prompt_tokens, &given.output_tokens}) {
      *tokens = std::max<uint32_t>(1, static_cast<uint32_t>(std::lround(*tokens * options_.lengths)));
    }
    out.push_back({.arrival_s = arrivals->requests[i].arrival_s,
                   .prompt_tokens = given.prompt_tokens,
                   .output_tokens = given.output_tokens,
                   .experts = process_->experts(given, mix64(seed) ^ i)});
  }
  return out;
}

Result<GimbalWorkload> GimbalTraffic::draw(sim::LengthMix mix, uint64_t seed) {
  GimbalWorkload out{.mix = mix, .seed = seed};
  auto drawn = requests(mix, seed, options_.requests);
  if (!drawn) return std::move(drawn).error();
  out.requests = *std::move(drawn);
  auto profiled = requests(mix, kProfiled + seed, std::min(kProfiledRequests, options_.requests));
  if (!profiled) return std::move(profiled).error();
  auto moetuner = moetuner_placement(*profiled, options_.domains);
  if (!moetuner) return std::move(moetuner).error();
  out.moetuner = *std::move(moetuner);
  auto sem_moe = sem_moe_placement(*profiled);
  if (!sem_moe) return std::move(sem_moe).error();
  out.sem_moe = *std::move(sem_moe);
  const std::vector<uint32_t> nearest = nearest_engines(out.requests, *out.sem_moe);
  for (size_t i = 0; i < nearest.size(); ++i) out.requests[i].assigned = static_cast<int32_t>(nearest[i]);
  return out;
}

Result<GimbalCell> run_gimbal_cell(const GimbalSetup& setup, const GimbalWorkload& workload, double rate,
                                   std::string_view name) {
  const std::optional<Arm> arm = arm_of_name(name);
  if (!arm) return invalid(fmt::format("'{}' is none of those compared", name), "arm");
  std::vector<sim::SimRequest> requests = workload.requests;
  for (size_t i = 0; i < requests.size(); ++i) {
    sim::SimRequest& request = requests[i];
    request.arrival_s /= rate;
    if (is_bound(workload, i, setup.by_domain)) {
      request.direct = sim::EnginePlace{.worker = 0, .engine = request.experts.domain % kGimbalEngines};
    }
  }
  const Result<sim::SimResult> run = sim::run_cluster(cluster_of(setup, workload, name, *arm), requests);
  if (!run) return run.error();
  const sim::Summary summary = sim::summarize(*run);
  const sim::WorkerReport& worker = run->workers.front();
  GimbalCell out{.ttft_s = summary.ttft_s.mean,
                 .ttft_p99_s = summary.ttft_s.p99,
                 .tpot_s = summary.tpot_s.mean,
                 .e2e_s = summary.total_s.mean,
                 .requests_per_s = summary.requests_per_s,
                 .kv = worker.kv_share_s / worker.here_s,
                 .gap_tokens_per_s = log_gap(worker, requests.front().arrival_s, requests.back().arrival_s),
                 .remote_share = worker.experts.remote_share(),
                 .max_over_mean = worker.experts.max_over_mean(kGimbalRanks),
                 .experts = summary.active_experts,
                 .worst_rank_experts = summary.worst_rank_experts,
                 .migrations = static_cast<double>(worker.experts.migrations),
                 .stalled_s = worker.experts.stalled_s};
  for (const sim::EngineReport& engine : worker.engines) {
    out.running += engine.running_s / worker.here_s / kGimbalEngines;
  }
  return out;
}

}  // namespace kindred::reproduce
