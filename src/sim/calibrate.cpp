#include "sim/calibrate.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "expert/prediction.h"
#include "sim/nelder_mead.h"
#include "sim/step_time.h"

namespace kindred::sim {
namespace {

constexpr uint32_t kMeasured = 64;  // prototypes a domain: enough for batches of 64
constexpr uint32_t kPromptTokens = 256;
constexpr double kRefused = 1e6;

// What a tape's tokens [begin, end) use, as frequencies, added to `counts` [L, E].
void count_tape(const ExpertTape& tape, uint32_t experts, uint32_t begin, uint32_t end, std::vector<uint32_t>& counts) {
  for (uint32_t t = begin; t < end; ++t) {
    const auto words = tape.token(t);
    for (size_t w = 0; w < words.size(); ++w) {
      for (uint64_t left = words[w]; left != 0; left &= left - 1) {
        const size_t layer = w / tape.words();
        const size_t expert = w % tape.words() * 64 + static_cast<size_t>(std::countr_zero(left));
        ++counts[layer * experts + expert];
      }
    }
  }
}

struct Halves {
  std::vector<double> first, second;
};

void subtract_mean(std::vector<Halves>& requests, std::vector<double> Halves::*half) {
  std::vector<double> mean((requests[0].*half).size(), 0);
  for (const Halves& request : requests) {
    for (size_t i = 0; i < mean.size(); ++i) mean[i] += (request.*half)[i] / static_cast<double>(requests.size());
  }
  for (Halves& request : requests) {
    double square = 0;
    for (size_t i = 0; i < mean.size(); ++i) {
      (request.*half)[i] -= mean[i];
      square += (request.*half)[i] * (request.*half)[i];
    }
    if (square > 0) {
      for (double& x : request.*half) x /= std::sqrt(square);
    }
  }
}

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// Sums of unit vectors give the sums of all their products.
std::vector<double> sum_of(const std::vector<Halves>& requests, std::vector<double> Halves::*half, size_t begin,
                           size_t end) {
  std::vector<double> sum((requests[0].*half).size(), 0);
  for (size_t r = begin; r < end; ++r) {
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += (requests[r].*half)[i];
  }
  return sum;
}

// `requests` in blocks of kMeasured, one a domain.
void measure_cosines(std::vector<Halves>& requests, ExpertStatistics& statistics) {
  subtract_mean(requests, &Halves::first);
  subtract_mean(requests, &Halves::second);
  double same_request = 0, same_domain = 0;
  for (const Halves& request : requests) same_request += dot(request.first, request.second);
  const size_t n = requests.size();
  for (size_t begin = 0; begin < n; begin += kMeasured) {
    same_domain += dot(sum_of(requests, &Halves::first, begin, begin + kMeasured),
                       sum_of(requests, &Halves::second, begin, begin + kMeasured));
  }
  const double all = dot(sum_of(requests, &Halves::first, 0, n), sum_of(requests, &Halves::second, 0, n));
  const auto count = static_cast<double>(n);
  statistics.same_request = same_request / count;
  statistics.same_domain = (same_domain - same_request) / (count * (kMeasured - 1));
  const double pairs = count * (count - kMeasured);
  statistics.across = pairs > 0 ? (all - same_domain) / pairs : 0;
}

struct Recording {
  expert::Activations activations;
  std::vector<Halves> halves;
};

Result<Recording> record_process(ExpertProcess& process) {
  Recording recording;
  const expert::ExpertShape& shape = process.shape();
  for (size_t d = 0; d < process.domains().size(); ++d) {
    for (uint32_t p = 0; p < kMeasured; ++p) {
      const TraceRequest request{.prompt_tokens = kPromptTokens,
                                 .output_tokens = 1,
                                 .expert_profile = static_cast<int32_t>(p),
                                 .domain = static_cast<int32_t>(d)};
      const RequestExperts experts = process.experts(request, d * kMeasured + p);
      const uint32_t tokens = experts.decode->tokens();
      std::vector<uint32_t> first(shape.cells(), 0);
      expert::ExpertCounts decode(shape);
      count_tape(*experts.decode, shape.experts, 0, tokens / 2, first);
      decode.data = first;
      count_tape(*experts.decode, shape.experts, tokens / 2, tokens, decode.data);
      decode.tokens = tokens;
      Halves halves;
      for (size_t i = 0; i < first.size(); ++i) {
        halves.first.push_back(first[i]);
        halves.second.push_back(decode.data[i] - first[i]);
      }
      recording.halves.push_back(std::move(halves));
      if (Status added = recording.activations.append(*experts.prompt, &decode, process.domains()[d]); !added) {
        return std::move(added).error();
      }
    }
  }
  return recording;
}

}  // namespace

Result<ExpertStatistics> measure_process(SyntheticOptions options) {
  options.prototypes = kMeasured;
  const Result<std::unique_ptr<ExpertProcess>> process = make_synthetic(options);
  if (!process) return process.error();
  Result<Recording> recording = record_process(**process);
  if (!recording) return std::move(recording).error();

  ExpertStatistics statistics;
  const Result<expert::Prediction> prediction = expert::predict_decode(recording->activations);
  if (!prediction) return prediction.error();
  // NaN where nothing varies: nothing foretells anything then.
  const auto number = [](double r) { return std::isnan(r) ? 0 : r; };
  statistics.request_correlation = number(prediction->mean_correlation);
  for (const expert::DomainPrediction& domain : prediction->domains) {
    statistics.correlation += number(domain.pooled_correlation) / static_cast<double>(prediction->domains.size());
  }
  const Result<std::vector<expert::BatchComparison>> batches =
      expert::compare_batches(recording->activations, kSavingBatches);
  if (!batches) return batches.error();
  for (size_t i = 0; i < kSavingBatches.size(); ++i) {
    const expert::BatchComparison& batch = (*batches)[i];
    statistics.savings[i] = {.batch = batch.batch, .same_domain = batch.same_domain, .mixed = batch.mixed};
    const double even = uniform_union(options.shape.experts, options.shape.top_k, batch.batch);
    if (i < 3) statistics.of_even += batch.mixed / even / 3;
    statistics.saving += statistics.savings[i].share() / static_cast<double>(kSavingBatches.size());
  }
  measure_cosines(recording->halves, statistics);
  return statistics;
}

std::vector<CalibrationTarget> published_targets() {
  return {
      {"prefill/decode correlation", 0.70, 0.92, 0.81, 0.05, &ExpertStatistics::correlation},
      {"fewer experts, one domain", 0.17, 0.21, 0.19, 0.01, &ExpertStatistics::saving},
      {"mixed batches over even use", 0.83, 0.86, 0.85, 0.02, &ExpertStatistics::of_even},
      {"cosine, same request", 0.80, 0.80, 0.80, 0.05, &ExpertStatistics::same_request},
      {"cosine, same domain", 0.43, 0.43, 0.43, 0.05, &ExpertStatistics::same_domain},
  };
}

Result<Calibration> calibrate_process(SyntheticOptions start, const std::vector<CalibrationTarget>& targets,
                                      int evaluations, const std::function<void(size_t, size_t)>& progress) {
  Calibration best{.options = start, .reached = {}, .misfit = kRefused};
  // The search moves the five deviations; what lies outside of their bounds is refused like any bad option.
  const std::array<double SyntheticOptions::*, 5> fields = {&SyntheticOptions::base, &SyntheticOptions::domain,
                                                            &SyntheticOptions::request, &SyntheticOptions::drift,
                                                            &SyntheticOptions::phase};
  if (Result<ExpertStatistics> tried = measure_process(start); !tried) return std::move(tried).error();
  size_t done = 0;
  const auto misfit = [&](std::span<const double> at) {
    SyntheticOptions options = start;
    for (size_t i = 0; i < fields.size(); ++i) options.*fields[i] = at[i];
    const Result<ExpertStatistics> reached = measure_process(options);
    progress(std::min<size_t>(++done, static_cast<size_t>(evaluations)), static_cast<size_t>(evaluations));
    if (!reached) return kRefused;
    double sum = 0;
    for (const CalibrationTarget& target : targets) {
      const double off = ((*reached).*target.figure - target.aim) / target.tolerance;
      sum += off * off / static_cast<double>(targets.size());
    }
    const double root = std::sqrt(sum);
    if (root < best.misfit) best = {.options = std::move(options), .reached = *reached, .misfit = root};
    return root;
  };
  std::vector<double> at;
  for (const auto field : fields) at.push_back(start.*field);
  const std::array<double, 5> scale = {0.2, 0.2, 0.2, 0.2, 0.2};
  // An iteration takes one or two evaluations, a few more when the simplex shrinks.
  (void)nelder_mead(misfit, at, scale, std::max(1, evaluations * 2 / 3));
  return best;
}

}  // namespace kindred::sim
