#include "sim/advise.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/rng.h"
#include "expert/fit.h"
#include "expert/union_model.h"
#include "sim/step_time.h"

namespace kindred::sim {
namespace {

// Fewer than two requests a cohort to fit to are no cohorts.
constexpr uint32_t kLeastOfCohort = 2;
constexpr uint32_t kMostBatch = 1U << 16;

// Requests whose batches are looked at: those of one cohort, or all.
struct Pool {
  std::vector<uint32_t> requests;

  // [cells]: the expected share of a batch's steps that leave an expert untouched.
  std::vector<double> untouched(const expert::Activations& activations, uint32_t batch, bool repeats) const {
    const size_t cells = activations.shape.cells();
    // Means over subsets of different requests, j of them: see expert::BatchUnion, which keeps only their sum.
    const uint32_t deep = repeats ? 1 : batch;
    std::vector<double> means(size_t{deep + 1} * cells, 1);
    double seen = 0;
    for (const uint32_t request : requests) {
      seen += 1;
      const std::vector<float> p =
          expert::inclusion_probabilities(activations.decode(request), activations.decode_tokens[request]);
      for (uint32_t j = std::min<uint32_t>(deep, static_cast<uint32_t>(seen)); j >= 1; --j) {
        double* mean = means.data() + j * cells;
        const double* shorter = mean - cells;
        const double share = j / seen;
        for (size_t c = 0; c < cells; ++c) mean[c] += share * ((1 - double{p[c]}) * shorter[c] - mean[c]);
      }
    }
    std::vector<double> out(means.end() - static_cast<std::ptrdiff_t>(cells), means.end());
    if (repeats) {
      for (double& q : out) q = std::pow(q, batch);
    }
    return out;
  }
};

struct Expected {
  double distinct = 0, us = 0;
};

// A step of one GPU of `ranks`, with `batch` requests each, that leaves experts untouched with those chances.
Expected expected_step(const StepTime& time, const expert::ExpertShape& shape, const std::vector<double>& untouched,
                       uint32_t ranks, uint32_t batch, double context_tokens) {
  const uint32_t each = shape.experts / ranks;
  const StepShape step{.decode_requests = batch, .decode_context_tokens = batch * context_tokens, .ranks = ranks};
  StepTime::Parts parts = time.parts(step);
  parts.moe_us = 0;
  Expected expected;
  const auto layers = static_cast<double>(shape.layers.size());
  for (size_t l = 0; l < shape.layers.size(); ++l) {
    double most = 0;
    for (uint32_t r = 0; r < ranks; ++r) {
      double distinct = 0;
      for (uint32_t e = r * each; e < (r + 1) * each; ++e) distinct += 1 - untouched[l * shape.experts + e];
      most = std::max(most, distinct);
    }
    expected.distinct += most / layers;
    parts.moe_us +=
        time.moe_layer_us(static_cast<double>(batch) * ranks, most, ranks) * time.profile().dims.moe_layers / layers;
  }
  expected.us = parts.total_us();
  return expected;
}

expert::Activations subset(const expert::Activations& all, const std::vector<uint32_t>& rows) {
  expert::Activations out;
  out.model = all.model;
  out.model_fingerprint = all.model_fingerprint;
  out.shape = all.shape;
  for (const uint32_t row : rows) {
    out.prompt_tokens.push_back(all.prompt_tokens[row]);
    out.decode_tokens.push_back(all.decode_tokens[row]);
    const auto prefill = all.prefill(row), decode = all.decode(row);
    out.prefill_counts.insert(out.prefill_counts.end(), prefill.begin(), prefill.end());
    out.decode_counts.insert(out.decode_counts.end(), decode.begin(), decode.end());
  }
  return out;
}

// The requests of each cohort, none empty. Those without a signature are in none.
std::vector<Pool> nearest_cohorts(const expert::CohortModel& model, const expert::Activations& activations,
                                  const std::vector<uint32_t>& rows) {
  std::vector<Pool> pools(model.cohorts());
  expert::Signature signature;
  for (const uint32_t row : rows) {
    expert::ExpertCounts counts(activations.shape);
    counts.tokens = activations.prompt_tokens[row];
    counts.data.assign(activations.prefill(row).begin(), activations.prefill(row).end());
    if (model.signature(counts, signature) != expert::SignatureProblem::kNone) continue;
    const std::vector<float> similar = model.similarities(signature);
    pools[static_cast<size_t>(std::max_element(similar.begin(), similar.end()) - similar.begin())].requests.push_back(
        row);
  }
  std::erase_if(pools, [](const Pool& pool) { return pool.requests.empty(); });
  return pools;
}

Status check_advice(const expert::Activations& activations, const Profile& profile, const AdviceOptions& options) {
  if (Status same = profile.check_experts(activations.shape); !same) return same;
  if (!activations.has_decode()) {
    return invalid("activations: no decode counts were recorded, and they are what steps are made of", "activations");
  }
  if (options.batches.empty() || options.ranks.empty() || options.workers == 0) {
    return invalid("advise: no batch, ranks or workers to look at", "batches");
  }
  for (const uint32_t batch : options.batches) {
    if (batch == 0 || batch > kMostBatch) {
      return invalid(fmt::format("batches: got {}; accepted: 1 to {}", batch, kMostBatch), "batches");
    }
  }
  return {};
}

}  // namespace

const AdviceRow* Advice::best() const {
  const auto less = [](const AdviceRow& a, const AdviceRow& b) { return a.time_saved() < b.time_saved(); };
  const auto most = std::max_element(rows.begin(), rows.end(), less);
  return most == rows.end() ? nullptr : &*most;
}

Result<Advice> advise(const expert::Activations& activations, const Profile& profile, const AdviceOptions& options) {
  if (Status good = check_advice(activations, profile, options); !good) return std::move(good).error();
  // By chance: recordings are often in an order, domain by domain or in turn.
  std::vector<uint32_t> fitted, judged;
  for (uint32_t i = 0; i < activations.requests(); ++i) {
    if (activations.decode_tokens[i] > 0) fitted.push_back(i);
  }
  Rng rng(options.seed);
  for (size_t i = fitted.size(); i > 1; --i) std::swap(fitted[i - 1], fitted[rng.below(i)]);
  judged.assign(fitted.begin() + static_cast<std::ptrdiff_t>((fitted.size() + 1) / 2), fitted.end());
  fitted.resize(fitted.size() - judged.size());
  if (judged.size() < size_t{options.workers} * kLeastOfCohort) {
    return invalid(fmt::format("activations: {} requests that decode; {} workers need at least {}, half of them to "
                               "make cohorts",
                               fitted.size() + judged.size(), options.workers, 2 * kLeastOfCohort * options.workers),
                   "activations");
  }
  const Result<expert::FitReport> fit =
      expert::fit_cohorts(subset(activations, fitted), {.workers = options.workers, .seed = options.seed});
  if (!fit) return fit.error();
  const std::vector<Pool> pools = nearest_cohorts(fit->model, activations, judged);
  Pool all;
  for (const Pool& pool : pools) all.requests.insert(all.requests.end(), pool.requests.begin(), pool.requests.end());
  if (pools.empty()) return invalid("activations: no request has a signature: all use the same experts", "activations");

  Advice advice;
  advice.requests = static_cast<uint32_t>(all.requests.size());
  advice.judged = all.requests;
  advice.cohorts = static_cast<uint32_t>(pools.size());
  advice.smallest = advice.requests;
  for (const Pool& pool : pools) {
    advice.smallest = std::min(advice.smallest, static_cast<uint32_t>(pool.requests.size()));
  }
  const StepTime time(profile);
  for (const uint32_t ranks : options.ranks) {
    if (Status fits = profile.check_ranks(ranks); !fits) {
      advice.skipped.push_back(fits.error().message);
      continue;
    }
    for (const uint32_t batch : options.batches) {
      const uint32_t together = batch * ranks;
      // Both sides alike, lest the estimates differ.
      AdviceRow row{.ranks = ranks, .batch = batch, .repeats = together > advice.smallest};
      const auto step = [&](const Pool& pool) {
        return expected_step(time, activations.shape, pool.untouched(activations, together, row.repeats), ranks, batch,
                             options.context_tokens);
      };
      const Expected mixed = step(all);
      row.mixed = mixed.distinct;
      row.mixed_us = mixed.us;
      for (const Pool& pool : pools) {
        const Expected one = step(pool);
        const double share = static_cast<double>(pool.requests.size()) / advice.requests;
        row.cohort += share * one.distinct;
        row.cohort_us += share * one.us;
      }
      advice.rows.push_back(row);
    }
  }
  return advice;
}

}  // namespace kindred::sim
