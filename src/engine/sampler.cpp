#include "engine/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/rng.h"

namespace kindred::engine {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr double kGreedyTemperature = 1e-5;  // vLLM's: below it, division by it is noise

// The first of the largest, so that ties go to the lowest id. -1 if there is none above -inf, or a
// NaN anywhere.
Token argmax(std::span<const float> logits) {
  Token best = -1;
  float most = kNever;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (std::isnan(logits[i])) return -1;
    if (logits[i] > most) {
      most = logits[i];
      best = static_cast<Token>(i);
    }
  }
  return best;
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

Result<Sample> Sampler::sample(std::span<const float> logits, uint64_t seed, uint64_t position) {
  logits_.assign(logits.begin(), logits.end());
  adjust(logits_);
  const Token likeliest = argmax(logits_);
  if (likeliest < 0 || !std::isfinite(logits_[static_cast<size_t>(likeliest)])) {
    return Error{ErrorCode::kInternal, "the model's output is not a number"};
  }
  Sample result;
  result.token = likeliest;
  if (params_.temperature >= kGreedyTemperature) {
    // Weights relative to the likeliest token; what is below e^-60 of it cannot be drawn with 53 bits.
    constexpr double kLeast = -60;
    const double most = logits_[static_cast<size_t>(likeliest)];
    double total = 0;
    weights_.resize(logits_.size());
    for (size_t i = 0; i < logits_.size(); ++i) {
      const double exponent = (logits_[i] - most) / params_.temperature;
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
