#include "policy/marginal_cost.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "expert/inner_product.h"
#include "policy/held_price.h"

namespace kindred::policy {
namespace {

// Costs that differ by less are equal: by rounding of sums of some thousand floats.
constexpr double kRounding = 1e-5;

// Cohorts keep domains apart where unions say little yet, at small batches; at large ones they only disturb. The
// weight is meant at 16 requests a worker.
constexpr double kHalvesAt = 8, kWeightHolds = 16;
double faded(double weight, double requests) {
  return weight * (1 + kWeightHolds / kHalvesAt) / (1 + requests / kHalvesAt);
}

// A placement of another model would be a bug elsewhere; without one, all experts are on one rank.
bool ranked(const WorkerView& worker, const expert::ExpertShape& shape) {
  return worker.ranks != nullptr && worker.ranks->layers() == shape.layers.size() &&
         worker.ranks->experts() == shape.experts;
}

}  // namespace

// Its share of the load, by its speed, times the cap: as load_limit() where all are alike, and rounded up as there.
bool MarginalCost::over_cap(const WorkerView& worker, double load, double speed, double request_load) const {
  if (load_cap_ == 0) return false;
  const double fair = load_cap_ * (load + request_load) * (speed_of(worker) / speed);
  return !(worker.load <= std::ceil(fair / request_load - kRounding) * request_load);
}

double MarginalCost::speed_of(const WorkerView& worker) const { return options_.learned ? 1 / worker.slowness : 1; }

std::optional<Decision> MarginalCost::choose(const DecodeSnapshot& snapshot, const DecodeRequest& request) {
  Decision decision;
  decision.policy = kMarginalCostName;
  decision.candidates = available_workers(snapshot.workers);
  if (decision.candidates.empty()) return std::nullopt;
  double load = 0, speed = 0;
  for (const uint32_t w : decision.candidates) {
    load += snapshot.workers[w].load;
    speed += speed_of(snapshot.workers[w]);
  }
  const size_t all = decision.candidates.size();
  const auto over = [&](uint32_t w) { return over_cap(snapshot.workers[w], load, speed, request.load); };
  if (!std::ranges::all_of(decision.candidates, over)) std::erase_if(decision.candidates, over);
  decision.capped = static_cast<uint32_t>(all - decision.candidates.size());
  decision.fallback = weigh(snapshot, request, decision);
  if (decision.fallback == FallbackReason::kNone) {
    const double least = *std::ranges::min_element(costs_);
    std::vector<uint32_t> cheapest;
    for (size_t i = 0; i < costs_.size(); ++i) {
      if (costs_[i] <= least + kRounding * std::abs(least)) cheapest.push_back(decision.candidates[i]);
    }
    if (!cheapest.empty()) decision.candidates = std::move(cheapest);  // none: a load that is not a number
    decision.reason = Reason::kMarginal;
  } else {
    decision.reason = Reason::kLeastLoaded;
  }
  std::span<const WorkerView> workers = snapshot.workers;
  if (held_weight_ > 0 && decision.reason == Reason::kLeastLoaded)
    workers = price_held(workers, request.prompt_tokens, held_weight_, priced_);
  decision.worker = chooser_.least_loaded(workers, decision.candidates);
  return decision;
}

// Fills costs_, or says why it cannot.
FallbackReason MarginalCost::weigh(const DecodeSnapshot& snapshot, const DecodeRequest& request, Decision& decision) {
  if (request.counts == nullptr || request.counts->tokens == 0 || request.counts->data.empty()) {
    return FallbackReason::kNoCounts;
  }
  const expert::ExpertCounts& counts = *request.counts;
  auto inclusion = std::make_shared<const expert::Inclusion>(expert::pack_inclusion(counts, options_.sharpen));
  inclusion_.resize(inclusion->codes.size());
  expert::unpack_inclusion(inclusion->codes, inclusion_);
  decision.inclusion = std::move(inclusion);
  rows_.clear();
  for (const uint32_t w : decision.candidates) {
    const std::span<const float> unused = snapshot.workers[w].unused;
    if (!unused.empty() && unused.size() != inclusion_.size()) return FallbackReason::kShapeMismatch;
    if (!unused.empty() && !ranked(snapshot.workers[w], counts.shape)) rows_.push_back(unused.data());
  }
  deltas_.resize(rows_.size());
  expert::dots(inclusion_, rows_, deltas_);
  double all_new = 0;  // what the request adds where nobody is; an addition a cell is as dear as all products
  if (rows_.size() < decision.candidates.size()) all_new = std::accumulate(inclusion_.begin(), inclusion_.end(), 0.0);

  const auto layers = static_cast<double>(counts.shape.layers.size());
  costs_.clear();
  size_t row = 0;
  double step = 0;
  for (const uint32_t w : decision.candidates) {
    const WorkerView& worker = snapshot.workers[w];
    const bool by_rank = ranked(worker, counts.shape);
    const double more = (by_rank ? expert::busiest_rank_used(*worker.ranks, worker.unused, inclusion_) - worker.used
                         : worker.unused.empty() ? all_new
                                                 : deltas_[row++]) /
                        layers;
    const double used = worker.used / layers;
    const StepLaw law = options_.learned ? worker.law : StepLaw{};
    costs_.push_back(law.joining(used, more, worker.requests) / speed_of(worker));
    step += law.step(used, worker.requests) / speed_of(worker);
  }
  mean_step_ = step / static_cast<double>(decision.candidates.size());
  if (held_weight_ > 0 && request.prompt_tokens > 0) add_transfer(snapshot, request, decision);
  if (options_.cohort_weight > 0 && snapshot.cohorts != nullptr) add_cohorts(snapshot, request, decision);
  return FallbackReason::kNone;
}

// Before the cohorts' term, so that it is in units of joining alone.
void MarginalCost::add_transfer(const DecodeSnapshot& snapshot, const DecodeRequest& request,
                                const Decision& decision) {
  const double joining = std::accumulate(costs_.begin(), costs_.end(), 0.0) / static_cast<double>(costs_.size());
  for (size_t i = 0; i < costs_.size(); ++i) {
    const double held = snapshot.workers[decision.candidates[i]].held_tokens / request.prompt_tokens;
    costs_[i] += held_weight_ * (1 - std::min(1.0, held)) * joining;
  }
}

// A worker without a cohort is as near as the best: it would starve otherwise. Where signatures cannot be made, the
// term is the same for all.
void MarginalCost::add_cohorts(const DecodeSnapshot& snapshot, const DecodeRequest& request, Decision& decision) {
  const expert::CohortModel& cohorts = *snapshot.cohorts;
  const std::string& fitted_for = cohorts.data().model_fingerprint;
  const bool other_model =
      !request.model_fingerprint.empty() && !fitted_for.empty() && request.model_fingerprint != fitted_for;
  if (other_model || cohorts.signature(*request.counts, signature_) != expert::SignatureProblem::kNone) return;
  const std::vector<float> similarities = cohorts.similarities(signature_);
  float best = kNoScore;
  for (const WorkerView& worker : snapshot.workers) {
    const auto cohort = static_cast<size_t>(worker.cohort);
    const bool sorted = worker.cohort >= 0 && cohort < similarities.size();
    decision.scores.push_back(sorted ? similarities[cohort] : kNoScore);
  }
  double requests = 0;
  for (const uint32_t w : decision.candidates) {
    best = std::max(best, decision.scores[w]);
    requests += snapshot.workers[w].requests;
  }
  const double weight = faded(options_.cohort_weight, requests / static_cast<double>(decision.candidates.size()));
  for (size_t i = 0; i < costs_.size(); ++i) {
    const float score = decision.scores[decision.candidates[i]];
    if (score > kNoScore) costs_[i] += weight * mean_step_ * (best - score);
  }
}

}  // namespace kindred::policy
