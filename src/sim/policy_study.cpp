#include "sim/policy_study.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "base/rng.h"
#include "sim/cluster.h"
#include "sim/summary.h"

namespace kindred::sim {
namespace {

constexpr uint32_t kStudyPromptTokens = 512;  // what counts for KV; experts come from the counts
constexpr double kSlowTimes = 1.6;
constexpr uint32_t kTurnovers = 10;  // times that all requests in flight are replaced, in a run
constexpr size_t kLeastStudied = 2400, kMostStudied = 24'000;
constexpr double kStudyWarmUp = 0.2, kStudyCoolDown = 0.1;

// A profile, taking some times as long.
struct ScaledCost final : StepCost {
  ScaledCost(const Profile& profile, double times) : cost(profile), scale(times) {}
  double step_s(const StepShape& shape) const override { return scale * cost.step_s(shape); }
  double kv_transfer_s(double tokens) const override { return cost.kv_transfer_s(tokens); }
  ProfileCost cost;
  double scale;
};

// Popularity of domains at `part` of a run, in [0, 1).
std::vector<double> domain_weights(StudyMix mix, size_t domains, double part) {
  std::vector<double> out(domains);
  const auto moved = mix == StudyMix::kDrifting ? static_cast<size_t>(part * static_cast<double>(domains)) : 0;
  for (size_t d = 0; d < domains; ++d) out[d] = 1.0 / static_cast<double>(1 + (d + moved) % domains);
  return out;
}

// Draws rows by the mix; equal seeds and positions give equal rows.
class MixDraw {
 public:
  MixDraw(std::span<const RequestExperts> rows, size_t domains, StudyMix mix) : rows_(rows), mix_(mix) {
    of_domain_.resize(domains);
    for (uint32_t i = 0; i < rows.size(); ++i) of_domain_[rows[i].domain].push_back(i);
    std::erase_if(of_domain_, [](const auto& rows_of) { return rows_of.empty(); });
  }

  const RequestExperts& draw(double part, Rng& rng) const {
    if (mix_ == StudyMix::kEven) return rows_[rng.below(rows_.size())];
    const std::vector<double> weights = domain_weights(mix_, of_domain_.size(), part);
    double sum = 0;
    for (const double weight : weights) sum += weight;
    double left = rng.uniform() * sum;
    size_t domain = 0;
    while (domain + 1 < weights.size() && left >= weights[domain]) left -= weights[domain++];
    const std::vector<uint32_t>& rows_of = of_domain_[domain];
    return rows_[rows_of[rng.below(rows_of.size())]];
  }

 private:
  std::span<const RequestExperts> rows_;
  StudyMix mix_;
  std::vector<std::vector<uint32_t>> of_domain_;
};

uint32_t output_of(const StudyPool& pool, const RequestExperts& experts) {
  return 1 + std::min(pool.most_output_tokens, experts.decode->tokens());
}

// Requests a second that one worker serves with so many of any requests at once.
double service_rate(const StudyPool& pool, const MixDraw& draw, double batch) {
  constexpr int kDraws = 24;
  Rng rng(7);
  const ProfileCost cost(pool.profile);
  const auto ranks = std::make_shared<const ExpertRanks>(
      ExpertRanks::linear(static_cast<uint32_t>(pool.shape.layers.size()), pool.shape.experts, 1));
  ExpertUnion experts(ranks);
  const auto requests = static_cast<uint32_t>(std::lround(batch));
  double step_s = 0, tokens = 0;
  for (int i = 0; i < kDraws; ++i) {
    experts.clear();
    for (uint32_t r = 0; r < requests; ++r) {
      const RequestExperts& one = draw.draw(static_cast<double>(i) / kDraws, rng);
      tokens += output_of(pool, one) - 1;
      experts.add(one.decode->token(static_cast<uint32_t>(rng.below(one.decode->tokens()))));
    }
    StepShape shape;
    shape.decode_requests = requests;
    shape.decode_context_tokens = requests * (kStudyPromptTokens + pool.most_output_tokens / 2.0);
    shape.experts = experts.count();
    step_s += cost.step_s(shape);
  }
  return batch / (step_s / kDraws * (tokens / (kDraws * static_cast<double>(requests))));
}

std::vector<SimRequest> draw_requests(const StudyPool& pool, const StudyCell& cell, uint64_t seed) {
  const MixDraw draw(pool.simulated, pool.domains.size(), cell.mix);
  double speed = cell.workers;
  if (cell.unlike) speed = cell.workers * (1 + 1 / kSlowTimes) / 2;
  const double rate = service_rate(pool, draw, cell.batch) * speed;
  const auto wanted = static_cast<size_t>(kTurnovers * cell.workers * cell.batch);
  const size_t count = std::clamp(wanted, kLeastStudied, kMostStudied);
  Rng rng(seed);
  std::vector<SimRequest> out;
  double at_s = 0;
  for (size_t i = 0; i < count; ++i) {
    at_s += -std::log1p(-rng.uniform()) / rate;
    SimRequest request;
    request.arrival_s = at_s;
    request.prompt_tokens = kStudyPromptTokens;
    request.experts = draw.draw(static_cast<double>(i) / static_cast<double>(count), rng);
    request.output_tokens = output_of(pool, request.experts);
    request.label = pool.domains[request.experts.domain];
    out.push_back(std::move(request));
  }
  return out;
}

// The same requests, with counts of what they will decode where those of their prompts were.
std::vector<SimRequest> foreseen(const StudyPool& pool, const std::vector<SimRequest>& requests) {
  std::map<const ExpertTape*, std::shared_ptr<const expert::ExpertCounts>> known;
  std::vector<SimRequest> out = requests;
  for (SimRequest& request : out) {
    auto& counts = known[request.experts.decode.get()];
    if (!counts) {
      counts = std::make_shared<const expert::ExpertCounts>(
          decoded_counts(request.experts, pool.shape, request.output_tokens - 1));
    }
    request.experts.prompt = counts;
  }
  return out;
}

Result<FittedCohorts> fit_cell(const StudyPool& pool, const StudyCell& cell) {
  const MixDraw draw(pool.calibrating, pool.domains.size(), cell.mix);
  Rng rng(99);
  std::vector<CalibrationRequest> requests;
  const size_t count = std::max<size_t>(pool.calibrating.size(), 4 * size_t{cell.workers});
  for (size_t i = 0; i < count; ++i) {
    CalibrationRequest one;
    one.experts = draw.draw(0, rng);
    one.decode_tokens = output_of(pool, one.experts) - 1;
    requests.push_back(std::move(one));
  }
  const Result<expert::Activations> recorded = record_activations(requests);
  if (!recorded) return recorded.error();
  return fit_for(*recorded, cell.workers, 1);
}

ClusterOptions cluster_of(const StudyPool& pool, const StudyCell& cell) {
  ClusterOptions out;
  WorkerGroup prefill;
  prefill.name = "prefill";
  prefill.role = Role::kPrefill;
  auto quick = std::make_shared<LinearCost>();
  quick->host_s = 1e-4;
  prefill.cost = quick;
  prefill.engine.kv.blocks = 1U << 24;
  prefill.engine.kv.cache = false;
  prefill.engine.token_budget = 1U << 20;
  prefill.engine.max_running = 1U << 16;
  out.groups.push_back(prefill);
  const auto decode = [&](std::string name, uint32_t count, double times) {
    WorkerGroup group = prefill;
    group.name = std::move(name);
    group.role = Role::kDecode;
    group.count = count;
    group.cost = std::make_shared<ScaledCost>(pool.profile, times);
    if (count > 0) out.groups.push_back(std::move(group));
  };
  decode("decode", cell.unlike ? cell.workers - cell.workers / 2 : cell.workers, 1);
  if (cell.unlike) decode("slow", cell.workers / 2, kSlowTimes);
  if (cell.stale) {
    out.routers = 4;
    out.router.fleet.load = fleet::LoadSource::kPolled;
    out.poll_ms = 1000;
  }
  return out;
}

std::array<double, kStudyFigures> figures_of(const SimResult& result) {
  const size_t count = result.requests.size();
  std::vector<double> tpot_s;
  const auto first = static_cast<size_t>(kStudyWarmUp * static_cast<double>(count));
  const auto last = static_cast<size_t>((1 - kStudyCoolDown) * static_cast<double>(count));
  for (size_t i = first; i < last; ++i) {
    const RequestRecord& record = result.requests[i];
    if (record.ended == Ended::kOk && record.output_tokens > 1) tpot_s.push_back(record.tpot_s());
  }
  const Spread spread = spread_of(std::move(tpot_s));
  return {spread.mean, spread.p50, spread.p99};
}

}  // namespace

std::string_view to_string(StudyMix mix) {
  switch (mix) {
    case StudyMix::kEven: return "even";
    case StudyMix::kSkewed: return "skewed";
    case StudyMix::kDrifting: return "drifting";
  }
  return "";
}

std::string cell_text(const StudyCell& cell) {
  return fmt::format("{}D, batch {:g}, {}{}{}", cell.workers, cell.batch, to_string(cell.mix),
                     cell.unlike ? ", unlike workers" : "", cell.stale ? ", stale" : "");
}

StudyPool make_study_pool(std::string name, ExpertProcess& process, Profile profile, uint32_t drawn) {
  StudyPool out;
  out.name = std::move(name);
  out.shape = process.shape();
  out.domains = process.domains();
  out.profile = std::move(profile);
  const uint32_t rows = process.recorded() > 0 ? process.recorded() : drawn;
  for (uint32_t i = 0; i < rows; ++i) {
    TraceRequest like;
    like.prompt_tokens = kStudyPromptTokens;
    like.output_tokens = out.most_output_tokens;
    if (process.recorded() > 0) like.expert_profile = static_cast<int32_t>(i);
    (i % 3 == 0 ? out.calibrating : out.simulated).push_back(process.experts(like, i));
  }
  return out;
}

std::vector<StudyPolicy> study_policies(bool variants) {
  std::vector<StudyPolicy> out;
  const auto add = [&](std::string name, const std::string& policy) -> StudyPolicy& {
    StudyPolicy one;
    one.name = std::move(name);
    one.options.name = policy;
    out.push_back(std::move(one));
    return out.back();
  };
  for (const char* name : {"round-robin", "least-loaded", "power-of-two"}) add(name, name).baseline = true;
  add("domain", "domain");
  for (const double tau : {0.0, 0.05, 0.1, 0.2}) {
    add(fmt::format("band tau={:g}", tau), "locality-band").options.tau = tau;
  }
  add("marginal-cost", "marginal-cost");
  add("marginal-cost, no cohorts", "marginal-cost").cohorts = false;
  StudyPolicy& oracle = add("marginal-cost, foresees", "marginal-cost");
  oracle.foresees = true;
  if (!variants) return out;
  for (const double weight : {0.05, 0.3, 0.6}) {
    add(fmt::format("marginal-cost, kappa={:g}", weight), "marginal-cost").options.marginal.cohort_weight = weight;
  }
  add("marginal-cost, not learned", "marginal-cost").options.marginal.learned = false;
  add("marginal-cost, cap 1.5", "marginal-cost").options.load_cap = 1.5;
  add("marginal-cost, pi^1.5", "marginal-cost").options.marginal.sharpen = 1.5;
  add("marginal-cost, no cap", "marginal-cost").options.load_cap = 0;
  return out;
}

Result<std::vector<StudyRow>> run_study_cell(const StudyPool& pool, const StudyCell& cell,
                                             std::span<const StudyPolicy> policies, std::span<const uint64_t> seeds) {
  const Result<FittedCohorts> cohorts = fit_cell(pool, cell);
  if (!cohorts) return cohorts.error();
  ClusterOptions cluster = cluster_of(pool, cell);
  std::vector<StudyRow> rows(policies.size());
  const auto runs = static_cast<double>(seeds.size());
  std::vector<std::vector<std::array<double, kStudyFigures>>> changes;  // [seed][policy]
  for (const uint64_t seed : seeds) {
    const std::vector<SimRequest> requests = draw_requests(pool, cell, seed);
    const std::vector<SimRequest> oracle = foreseen(pool, requests);
    std::vector<std::array<double, kStudyFigures>> figures;
    std::array<double, kStudyFigures> best;
    best.fill(INFINITY);
    for (size_t p = 0; p < policies.size(); ++p) {
      cluster.router.decode = policies[p].options;
      cluster.router.decode.seed = seed;
      cluster.router.cohorts = policies[p].cohorts ? cohorts->model : nullptr;
      const Result<SimResult> result = run_cluster(cluster, policies[p].foresees ? oracle : requests);
      if (!result) return result.error();
      figures.push_back(figures_of(*result));
      const Summary summary = summarize(*result);
      rows[p].policy = policies[p].name;
      rows[p].active_experts += summary.active_experts / runs;
      rows[p].batch += summary.decode_batch / runs;
      for (size_t f = 0; f < kStudyFigures; ++f) {
        rows[p].tpot_s[f] += figures[p][f] / runs;
        if (policies[p].baseline) best[f] = std::min(best[f], figures[p][f]);
      }
    }
    for (auto& of : figures) {
      for (size_t f = 0; f < kStudyFigures; ++f) of[f] = of[f] / best[f] - 1;
    }
    changes.push_back(std::move(figures));
  }
  for (size_t p = 0; p < policies.size(); ++p) {
    for (size_t f = 0; f < kStudyFigures; ++f) {
      double squares = 0;
      for (const auto& of : changes) rows[p].change[f] += of[p][f] / runs;
      for (const auto& of : changes) squares += (of[p][f] - rows[p].change[f]) * (of[p][f] - rows[p].change[f]);
      if (seeds.size() > 1) rows[p].error[f] = std::sqrt(squares / (runs - 1) / runs);
    }
  }
  return rows;
}

}  // namespace kindred::sim
