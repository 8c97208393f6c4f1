#include "reproduce/eldr_law.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <set>

#include "base/rng.h"

namespace kindred::reproduce {
namespace {

// Shares of peak bandwidth: means of those that `profiles/` have for H100, H200 and B200 (bytes of an expert / (b x
// peak bandwidth)): 0.91, 0.89 and 0.90 for Qwen3-30B-A3B's 16 bits; 0.78, 0.56 and 0.60 for GPT-OSS-120B's MXFP4.
constexpr double kShare16 = 0.90, kShareMxfp4 = 0.65;
// Bytes: Qwen3 3 x 2048 x 768 in 16 bits; GPT-OSS-120B 3 x 2880 x 2880 at 4.25 bits; Gemma-4-26B-A4B: about 24 of its
// 26 billion parameters are experts, in 30 x 128, in 16 bits.
const std::array<EldrModel, 3> kModels = {{{"qwen", "Qwen3-30B-A3B", 48, 128, 8, 9.44e6, kShare16},
                                           {"gptoss", "GPT-OSS-120B", 36, 128, 4, 13.2e6, kShareMxfp4},
                                           {"gemma", "Gemma-4-26B-A4B", 30, 128, 8, 12.5e6, kShare16}}};
constexpr double kBytesPerUs = 5.3e6;  // of an MI300X's memory
// Experts of 3 x 4096 x 1536 in 16 bits.
const EldrModel kLarge = {"qwen235b", "Qwen3-235B-A22B", 94, 128, 8, 37.7e6, kShare16};
// Assumptions: an all-reduce of a few tokens among four GPUs; what a token activates (22 of 235 and 3.3 of 30.5
// billion parameters), of which each of the four computes a quarter.
constexpr double kAllReduceMs = 0.02, kAllReducesPerLayer = 2, kMoreActive = 22 / 3.3;

constexpr uint32_t kLargestGraph = 512;
// An assumption: what KV of a token takes, and a link of 50 GB/s. 512 tokens are a millisecond, of which a request's
// TPOT sees 1/511.
constexpr double kKvBytesPerToken = 100e3, kLinkBytesPerS = 50e9;
constexpr uint32_t kDraws = 64;      // batches that mixed_experts looks at
constexpr double kLeastShare = 0.1;  // a row that runs a class less often says nothing of it

// Of round-robin among 16: every sixteenth arrival of a Poisson process, so the number in service scatters with a
// sixteenth of Poisson's variance (and a little for steps that differ).
double spread_of(double batch) { return std::sqrt(batch / kDecodeWorkers + 0.5); }

double at(std::span<const double> mixed, double batch) {
  const double clamped = std::clamp(batch, 0.0, static_cast<double>(mixed.size() - 1));
  const auto low = static_cast<size_t>(clamped);
  const size_t high = std::min(low + 1, mixed.size() - 1);
  return std::lerp(mixed[low], mixed[high], clamped - static_cast<double>(low));
}

// The batches that a worker has while it holds `batch` on average, and how often.
template <class Visit>
void for_batches(double batch, const Visit& visit) {
  const double sigma = spread_of(batch), reach = 3 * sigma;
  const auto least = static_cast<uint32_t>(std::max(1.0, std::floor(batch - reach)));
  const auto most = static_cast<uint32_t>(std::max(1.0, std::ceil(batch + reach)));
  for (uint32_t n = least; n <= most; ++n) {
    const double z = (n - batch) / sigma;
    visit(n, std::exp(-z * z / 2));
  }
}

double mean_step_ms(const DecodeLaw& law, const EldrModel& model, double batch, std::span<const double> mixed) {
  double weights = 0, sum = 0;
  for_batches(batch, [&](uint32_t n, double weight) {
    weights += weight;
    sum += weight * law.step_ms(n, model.layers * at(mixed, n));
  });
  return sum / weights;
}

// How often a worker that holds `batch` on average runs each class of kernels, in shares.
std::array<double, kTunedSizes.size()> class_shares(double batch) {
  std::array<double, kTunedSizes.size()> out{};
  double weights = 0;
  for_batches(batch, [&](uint32_t n, double weight) {
    out.at(tuned_class(captured_size(n))) += weight;
    weights += weight;
  });
  for (double& share : out) share /= weights;
  return out;
}

// Classes that nobody ran stand between their neighbours, by the logarithm of their sizes, or are the nearest one's.
void fill_kernels(std::array<double, kTunedSizes.size()>& kernel, const std::array<bool, kTunedSizes.size()>& known) {
  for (size_t c = 0; c < kernel.size(); ++c) {
    if (known[c]) continue;
    size_t below = c, above = c;
    while (below > 0 && !known[below]) --below;
    while (above + 1 < kernel.size() && !known[above]) ++above;
    if (!known[below]) kernel[c] = kernel[above];
    else if (!known[above]) kernel[c] = kernel[below];
    else {
      const double part = std::log(double{1} * kTunedSizes[c] / kTunedSizes[below]) /
                          std::log(double{1} * kTunedSizes[above] / kTunedSizes[below]);
      kernel[c] = std::lerp(kernel[below], kernel[above], part);
    }
  }
}

}  // namespace

std::span<const EldrModel> eldr_models() { return kModels; }

const EldrModel& large_model() { return kLarge; }

DecodeLaw large_law(const EldrModel& from, const DecodeLaw& law) {
  DecodeLaw out = law;
  out.fixed_ms = law.fixed_ms * kLarge.layers / from.layers + kLarge.layers * kAllReducesPerLayer * kAllReduceMs;
  out.token_us = law.token_us * kMoreActive / kLargeRanks;
  out.expert_us = kLarge.expert_bytes / (kBytesPerUs * kLarge.bandwidth_share);
  return out;
}

PrefillLaw large_law(const EldrModel& from, const PrefillLaw& law) {
  PrefillLaw out = law;
  out.fixed_ms = law.fixed_ms * kLarge.layers / from.layers + kLarge.layers * kAllReducesPerLayer * kAllReduceMs;
  out.token_us = law.token_us * kMoreActive / kLargeRanks;
  return out;
}

uint32_t captured_size(uint32_t tokens) {
  if (tokens <= 2) return std::max(tokens, 1U);
  if (tokens <= 4) return 4;
  if (tokens <= 256) return (tokens + 7) / 8 * 8;
  if (tokens <= kLargestGraph) return (tokens + 15) / 16 * 16;
  return tokens;
}

size_t tuned_class(uint32_t tokens) {
  size_t best = 0;
  const auto distance = [&](size_t c) { return std::abs(int64_t{kTunedSizes[c]} - int64_t{tokens}); };
  for (size_t c = 1; c < kTunedSizes.size(); ++c) {
    if (distance(c) < distance(best)) best = c;
  }
  return best;
}

double DecodeLaw::step_ms(uint32_t batch, double experts) const {
  const uint32_t graph = captured_size(batch);
  return fixed_ms + 1e-3 * (token_us * graph + expert_us * experts * kernel[tuned_class(graph)]);
}

double EldrCost::step_s(const sim::StepShape& shape) const {
  double ms = 0;
  if (shape.prefill_tokens > 0) ms += prefill_.fixed_ms + 1e-3 * prefill_.token_us * shape.prefill_tokens;
  if (shape.decode_requests > 0) {
    ms += decode_.step_ms(shape.decode_requests, std::accumulate(shape.experts.begin(), shape.experts.end(), 0.0));
  }
  return 1e-3 * ms;
}

double EldrCost::kv_transfer_s(double tokens) const { return tokens * kKvBytesPerToken / kLinkBytesPerS; }

std::vector<double> mixed_experts(sim::ExpertProcess& process, uint32_t most_batch, uint64_t seed) {
  const auto layers = static_cast<double>(process.shape().layers.size());
  std::vector<double> out(most_batch + 1, 0);
  Rng rng(mix64(seed));
  sim::TraceRequest any;
  any.prompt_tokens = any.output_tokens = 1;
  std::vector<uint64_t> bits;
  for (uint32_t draw = 0; draw < kDraws; ++draw) {
    bits.clear();
    for (uint32_t n = 1; n <= most_batch; ++n) {
      const sim::RequestExperts experts = process.experts(any, rng.next() >> 24);
      const std::span<const uint64_t> row =
          experts.decode->token(static_cast<uint32_t>(rng.below(experts.decode->tokens())));
      bits.resize(row.size(), 0);
      uint64_t distinct = 0;
      for (size_t w = 0; w < row.size(); ++w) {
        bits[w] |= row[w];
        distinct += static_cast<uint64_t>(std::popcount(bits[w]));
      }
      out[n] += static_cast<double>(distinct) / layers / kDraws;
    }
  }
  return out;
}

double round_robin_tpot_ms(const DecodeLaw& law, const EldrModel& model, double rate, std::span<const double> mixed) {
  // Little's law, with half of each correction: a law that falls somewhere would make full ones swing.
  double tpot_ms = 20;
  for (int i = 0; i < 100; ++i) {
    const double batch = rate / kDecodeWorkers * (kOutputTokens - 1) * tpot_ms * 1e-3;
    tpot_ms = std::lerp(tpot_ms, std::min(mean_step_ms(law, model, batch, mixed), 1000.0), 0.5);
  }
  return tpot_ms;
}

Result<LawFit> fit_law(const EldrModel& model, std::span<const EldrRow> round_robin,
                       const std::array<std::vector<double>, 2>& mixed) {
  LawFit out;
  std::ranges::copy_if(round_robin, std::back_inserter(out.rows),
                       [&](const EldrRow& row) { return row.model == model.key && row.policy == "rr"; });
  std::set<uint32_t> rates;
  for (const EldrRow& row : out.rows) rates.insert(row.rate);
  if (rates.size() < 3) return invalid("round-robin rows of " + model.key + " at fewer than three rates", "rows");
  struct Point {
    double batch, graph, experts_ms, rest_ms;  // of a step: experts by bandwidth alone, and what is left
    double weight;
  };
  out.law.expert_us = model.expert_bytes / (kBytesPerUs * model.bandwidth_share);
  std::vector<Point> points;
  for (const EldrRow& row : out.rows) {
    const double batch = double{1} * row.rate / kDecodeWorkers * (kOutputTokens - 1) * row.tpot50_ms * 1e-3;
    double graph = 0, weights = 0;
    for_batches(batch, [&](uint32_t n, double weight) {
      graph += weight * captured_size(n);
      weights += weight;
    });
    const double experts = model.layers * at(mixed[static_cast<size_t>(row.workload)], batch);
    const double experts_ms = 1e-3 * out.law.expert_us * experts;
    points.push_back({.batch = batch,
                      .graph = graph / weights,
                      .experts_ms = experts_ms,
                      .rest_ms = row.tpot50_ms - experts_ms,
                      .weight = 1 / (row.tpot50_ms * row.tpot50_ms)});
  }
  double w = 0, wx = 0, wy = 0, wxx = 0, wxy = 0;
  for (const Point& p : points) {
    w += p.weight;
    wx += p.weight * p.graph;
    wy += p.weight * p.rest_ms;
    wxx += p.weight * p.graph * p.graph;
    wxy += p.weight * p.graph * p.rest_ms;
  }
  const double slope = std::max(0.0, (w * wxy - wx * wy) / (w * wxx - wx * wx));
  out.law.fixed_ms = std::max(0.0, (wy - slope * wx) / w);
  out.law.token_us = 1e3 * slope;

  std::array<double, kTunedSizes.size()> sums{}, shares{};
  std::array<bool, kTunedSizes.size()> known{};
  for (const Point& p : points) {
    const double kernel = 1 + (p.rest_ms - out.law.fixed_ms - slope * p.graph) / p.experts_ms;
    const auto of = class_shares(p.batch);
    for (size_t c = 0; c < of.size(); ++c) {
      if (of[c] < kLeastShare) continue;
      sums[c] += of[c] * kernel;
      shares[c] += of[c];
      known[c] = true;
    }
  }
  for (size_t c = 0; c < sums.size(); ++c) out.law.kernel[c] = known[c] ? sums[c] / shares[c] : 1;
  fill_kernels(out.law.kernel, known);

  double sum = 0;
  for (const EldrRow& row : out.rows) {
    out.predicted_ms.push_back(round_robin_tpot_ms(out.law, model, row.rate, mixed[static_cast<size_t>(row.workload)]));
    sum += std::pow(out.predicted_ms.back() / row.tpot50_ms - 1, 2);
  }
  out.rms = std::sqrt(sum / static_cast<double>(out.rows.size()));
  return out;
}

}  // namespace kindred::reproduce
