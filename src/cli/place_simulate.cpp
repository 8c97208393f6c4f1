// `kindred place --calibrate`, by simulation: engines that send their tokens as the traffic has it, ranks whose experts
// greedy places anew every few seconds, with its calibrated weights and with (1, 1, 0).

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/rng.h"
#include "cli/place.h"
#include "cli/simulate.h"
#include "sim/cluster.h"
#include "sim/summary.h"
#include "sim/trace_reader.h"

namespace kindred::cli {
namespace {

constexpr uint32_t kPlaceTapeTokens = 512;
constexpr uint32_t kPlacePromptTokens = 512, kPlaceOutputTokens = 128;
constexpr uint32_t kPlaceRequests = 400;  // an engine
constexpr double kPlaceRequestsPerS = 5;  // an engine
constexpr double kPlaceWindow_s = 10;     // the worker's own
constexpr int kPlaceMostRepeats = 200;

// Tokens that choose top_k experts of each layer as one source's traffic does.
sim::RequestExperts experts_of_source(const place::Traffic& traffic, uint32_t source, uint32_t top_k, Rng& rng) {
  expert::ExpertShape shape;
  shape.layers.resize(traffic.layers);
  std::iota(shape.layers.begin(), shape.layers.end(), 0U);
  shape.experts = traffic.experts;
  shape.top_k = top_k;
  auto tape = std::make_shared<sim::ExpertTape>(shape, kPlaceTapeTokens);
  auto counts = std::make_shared<expert::ExpertCounts>(shape);
  counts->tokens = kPlaceTapeTokens;
  std::vector<double> upto(traffic.experts);
  std::vector<uint32_t> chosen;
  for (uint32_t l = 0; l < traffic.layers; ++l) {
    const auto row = traffic.layer(l).subspan(size_t{source} * traffic.experts, traffic.experts);
    std::partial_sum(row.begin(), row.end(), upto.begin());
    for (uint32_t t = 0; t < kPlaceTapeTokens; ++t) {
      chosen.clear();
      for (int tries = 0; chosen.size() < top_k; ++tries) {
        // Few experts with traffic: any other one, once drawing finds no more.
        const double at = rng.uniform() * upto.back();
        const auto found = std::upper_bound(upto.begin(), upto.end() - 1, at) - upto.begin();
        const auto expert = tries < kPlaceMostRepeats && upto.back() > 0
                                ? static_cast<uint32_t>(found)
                                : static_cast<uint32_t>(rng.below(shape.experts));
        if (std::ranges::find(chosen, expert) != chosen.end()) continue;
        chosen.push_back(expert);
        tape->set(t, l, expert);
        ++counts->data[size_t{l} * shape.experts + expert];
      }
    }
  }
  return {.prompt = std::move(counts), .decode = std::move(tape)};
}

Result<std::vector<sim::SimRequest>> requests_of_sources(const place::Traffic& traffic, uint32_t top_k) {
  Rng rng(1);
  std::vector<sim::RequestExperts> experts;
  std::vector<double> share;
  for (uint32_t s = 0; s < traffic.sources; ++s) {
    experts.push_back(experts_of_source(traffic, s, top_k, rng));
    double tokens = 0;
    for (size_t l = 0; l < traffic.layers; ++l) {
      for (const double one : traffic.layer(l).subspan(size_t{s} * traffic.experts, traffic.experts)) tokens += one;
    }
    share.push_back(tokens + (share.empty() ? 0 : share.back()));
  }
  const uint32_t count = kPlaceRequests * traffic.sources;
  auto arrivals = sim::draw_arrivals({.requests = count, .rate_per_s = kPlaceRequestsPerS * traffic.sources});
  if (!arrivals) return std::move(arrivals).error();
  std::vector<sim::SimRequest> out;
  for (const sim::TraceRequest& arrival : arrivals->requests) {
    const double at = rng.uniform() * share.back();
    const auto source = static_cast<uint32_t>(std::upper_bound(share.begin(), share.end() - 1, at) - share.begin());
    sim::RequestExperts uses = experts[source];
    uses.first = static_cast<uint32_t>(rng.below(kPlaceTapeTokens));
    out.push_back({.arrival_s = arrival.arrival_s,
                   .prompt_tokens = kPlacePromptTokens,
                   .output_tokens = kPlaceOutputTokens,
                   .experts = std::move(uses),
                   .direct = sim::EnginePlace{.worker = 0, .engine = source}});
  }
  return out;
}

}  // namespace

Result<PlaceSimulation> simulate_weights(const place::Problem& problem, const place::Weights& weights,
                                         const std::string& profile_name, const place::MigrationOptions& migration) {
  const place::Traffic& traffic = problem.traffic;
  Result<sim::Profile> profile = find_profile(profile_name);
  if (!profile) return std::move(profile).error();
  if (profile->dims.experts != traffic.experts || profile->dims.moe_layers < traffic.layers) {
    return invalid(fmt::format("'{}' has {} layers of {} experts; the traffic has {} of {}", profile_name,
                               profile->dims.moe_layers, profile->dims.experts, traffic.layers, traffic.experts),
                   "profile");
  }
  if (problem.ranks() < 2 || problem.ranks() % traffic.sources != 0 || problem.redundant > 0) {
    return invalid("needs 2 ranks or more, as many for each source, and no redundant slots", "ranks");
  }
  if (Status fits = profile->check_ranks(problem.ranks()); !fits) return std::move(fits).error();
  const auto requests = requests_of_sources(traffic, profile->dims.top_k);
  if (!requests) return requests.error();
  sim::WorkerGroup group;
  group.name = "placed";
  group.engines = traffic.sources;
  group.ranks = problem.ranks();
  const uint64_t kv_tokens = profile->kv_capacity_tokens(problem.ranks()) / traffic.sources;
  group.engine.kv = {.blocks = static_cast<uint32_t>(std::min<uint64_t>(kv_tokens / 16, 1U << 24)),
                     .block_tokens = 16,
                     .piece_tokens = 512,
                     .cache = false};
  group.cost = std::make_shared<sim::ProfileCost>(*std::move(profile));
  sim::ExpertParallel& experts = group.expert_parallel.emplace();
  if (!problem.old.empty()) experts.at_first = std::make_shared<place::Placement>(problem.old);
  sim::PlacementControlOptions& control = experts.control.emplace();
  control.rebalance.solver = place::Solver::kGreedy;
  control.rebalance.migration = migration;
  control.weights = weights;
  control.hysteresis = false;
  control.window_s = kPlaceWindow_s;
  sim::ClusterOptions options;
  options.groups = {std::move(group)};
  const auto run = sim::run_cluster(options, *requests);
  if (!run) return run.error();
  const sim::Summary summary = sim::summarize(*run);
  const sim::ExpertReport& report = run->workers.front().experts;
  return PlaceSimulation{.ttft_s = summary.ttft_s.mean,
                         .tpot_s = summary.tpot_s.mean,
                         .remote_share = report.remote_share(),
                         .max_over_mean = report.max_over_mean(problem.ranks()),
                         .moved_experts = report.moved_experts,
                         .stalled_s = report.stalled_s};
}

}  // namespace kindred::cli
