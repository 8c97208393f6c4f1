#include "engine/sampler.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/rng.h"

namespace kindred::engine {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr double kGreedyTemperature = 1e-5;  // vLLM's: below it, division by it is noise

// The first of the largest, so that ties go to the lowest id. -1 if there is none above -inf, or a
// NaN anywhere. In lanes, since one running maximum is a chain of comparisons that each wait for the last.
Token argmax(std::span<const float> logits) {
  constexpr size_t kLanes = 16;
  std::array<float, kLanes> most;
  std::array<int32_t, kLanes> nan{};
  most.fill(kNever);
  const size_t whole = logits.size() / kLanes * kLanes;
  for (size_t i = 0; i < whole; i += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const float logit = logits[i + lane];
      most[lane] = logit > most[lane] ? logit : most[lane];
      nan[lane] |= logit != logit ? 1 : 0;
    }
  }
  bool any_nan = std::any_of(nan.begin(), nan.end(), [](int32_t n) { return n != 0; });
  float best = *std::max_element(most.begin(), most.end());
  for (const float logit : logits.subspan(whole)) {
    any_nan |= std::isnan(logit);
    best = std::max(best, logit);
  }
  if (any_nan || best == kNever) return -1;
  return static_cast<Token>(std::find(logits.begin(), logits.end(), best) - logits.begin());
}

// Zeroes all but the smallest set of likeliest tokens that holds `top_p` of the weight; ties by id.
void keep_nucleus(std::vector<double>& weights, double total, double top_p) {
  std::vector<uint32_t> heap;
  heap.reserve(weights.size());
  for (uint32_t i = 0; i < weights.size(); ++i) {
    if (weights[i] > 0) heap.push_back(i);
  }
  const auto less_likely = [&](uint32_t a, uint32_t b) {
    return weights[a] != weights[b] ? weights[a] < weights[b] : a > b;
  };
  std::make_heap(heap.begin(), heap.end(), less_likely);
  // What remains on the heap is what is dropped, so a peaked distribution costs few pops.
  double kept = 0;
  auto end = heap.end();
  while (end != heap.begin() && kept < top_p * total) {
    kept += weights[heap.front()];
    std::pop_heap(heap.begin(), end, less_likely);
    --end;
  }
  for (auto it = heap.begin(); it != end; ++it) weights[*it] = 0;
}

double log_sum_exp(std::span<const float> logits) {
  const double most = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit) - most);
  return most + std::log(sum);
}

}  // namespace

Sampler::Sampler(const SamplingParams& params, std::span<const Token> end_tokens, std::span<const Token> prompt,
                 std::span<const Token> generated)
    : params_(params), end_tokens_(end_tokens) {
  if (params_.repetition_penalty != 1.0) prompt_.insert(prompt.begin(), prompt.end());
  for (const Token token : generated) ++generated_[token];
  generated_count_ = static_cast<uint32_t>(generated.size());
}

void Sampler::adjust(std::vector<float>& logits) const {
  const auto at = [&](Token token) -> float* {
    return token >= 0 && static_cast<size_t>(token) < logits.size() ? &logits[static_cast<size_t>(token)] : nullptr;
  };
  for (const auto& [token, bias] : params_.logit_bias) {
    if (float* logit = at(token)) *logit += static_cast<float>(bias);
  }
  if (generated_count_ < params_.min_tokens) {
    for (const Token token : end_tokens_) {
      if (float* logit = at(token)) *logit = kNever;
    }
  }
  if (params_.repetition_penalty != 1.0) {
    const auto penalty = static_cast<float>(params_.repetition_penalty);
    const auto repeat = [&](Token token) {
      if (float* logit = at(token)) *logit = *logit > 0 ? *logit / penalty : *logit * penalty;
    };
    for (const Token token : prompt_) repeat(token);
    for (const auto& [token, count] : generated_) {
      if (!prompt_.contains(token)) repeat(token);
    }
  }
  if (params_.frequency_penalty != 0 || params_.presence_penalty != 0) {
    for (const auto& [token, count] : generated_) {
      if (float* logit = at(token)) {
        *logit -= static_cast<float>(params_.frequency_penalty * count + params_.presence_penalty);
      }
    }
  }
}

bool Sampler::adjusts() const {
  return !params_.logit_bias.empty() || generated_count_ < params_.min_tokens || params_.repetition_penalty != 1.0 ||
         params_.frequency_penalty != 0 || params_.presence_penalty != 0;
}

Result<Sample> Sampler::sample(std::span<const float> logits, uint64_t seed, uint64_t position) {
  std::span<const float> adjusted = logits;
  if (adjusts()) {
    logits_.assign(logits.begin(), logits.end());
    adjust(logits_);
    adjusted = logits_;
  }
  const Token likeliest = argmax(adjusted);
  if (likeliest < 0 || !std::isfinite(adjusted[static_cast<size_t>(likeliest)])) {
    return Error{ErrorCode::kInternal, "the model's output is not a number"};
  }
  Sample result;
  result.token = likeliest;
  if (params_.temperature >= kGreedyTemperature) {
    // Weights relative to the likeliest token; what is below e^-60 of it cannot be drawn with 53 bits.
    constexpr double kLeast = -60;
    const double most = adjusted[static_cast<size_t>(likeliest)];
    double total = 0;
    weights_.resize(adjusted.size());
    for (size_t i = 0; i < adjusted.size(); ++i) {
      const double exponent = (adjusted[i] - most) / params_.temperature;
      weights_[i] = exponent < kLeast ? 0 : std::exp(exponent);
      total += weights_[i];
    }
    if (params_.top_p < 1) {
      keep_nucleus(weights_, total, params_.top_p);
      total = std::accumulate(weights_.begin(), weights_.end(), 0.0);
    }
    // Drawn in the order of ids, not of weights: rounding that swaps two near ties changes nothing then.
    double left = uniform_at(seed, position) * total;
    for (size_t i = 0; i < weights_.size(); ++i) {
      if (weights_[i] <= 0) continue;
      result.token = static_cast<Token>(i);  // also the fallback if `left` is used up by rounding
      left -= weights_[i];
      if (left < 0) break;
    }
  }
  ++generated_[result.token];
  ++generated_count_;
  if (params_.logprobs >= 0) {
    result.logprob = logprob_of(logits, result.token);
    result.top = top_logprobs(logits, static_cast<size_t>(params_.logprobs));
  }
  return result;
}

float logprob_of(std::span<const float> logits, Token token) {
  return static_cast<float>(logits[static_cast<size_t>(token)] - log_sum_exp(logits));
}

std::vector<TokenLogprob> top_logprobs(std::span<const float> logits, size_t count) {
  count = std::min(count, logits.size());
  if (count == 0) return {};
  std::vector<uint32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0U);
  std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(count), order.end(),
                    [&](uint32_t a, uint32_t b) { return logits[a] != logits[b] ? logits[a] > logits[b] : a < b; });
  const double sum = log_sum_exp(logits);
  std::vector<TokenLogprob> top;
  for (size_t i = 0; i < count; ++i) {
    top.push_back({static_cast<Token>(order[i]), static_cast<float>(logits[order[i]] - sum)});
  }
  return top;
}

}  // namespace kindred::engine
