// Chooses the next token from logits. The draw depends on (seed, position) alone, so that a sequence
// continues identically on whichever worker it goes on.
//
// Thread-safety: Sampler belongs to one sequence and one thread.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/result.h"
#include "engine/types.h"

namespace kindred::engine {

struct Sample {
  Token token = 0;
  float logprob = 0;              // if params.logprobs >= 0: of the model, before params had their say
  std::vector<TokenLogprob> top;  // params.logprobs many, likeliest first; ties by token id
};

class Sampler {
 public:
  // `end_tokens` must outlive the sampler. `prompt` and `generated` are the history.
  Sampler(const SamplingParams& params, std::span<const Token> end_tokens, std::span<const Token> prompt,
          std::span<const Token> generated);

  // `position`: of the new token in its sequence, prompt included. Order: bias, min_tokens, penalties,
  // temperature, top_p, as in vLLM. Error: kInternal if the logits are not numbers.
  Result<Sample> sample(std::span<const float> logits, uint64_t seed, uint64_t position);

 private:
  bool adjusts() const;  // whether adjust() would change anything
  void adjust(std::vector<float>& logits) const;

  SamplingParams params_;
  std::span<const Token> end_tokens_;
  std::unordered_set<Token> prompt_;  // only if there is a repetition penalty
  std::unordered_map<Token, uint32_t> generated_;
  uint32_t generated_count_ = 0;
  std::vector<float> logits_;
  std::vector<double> weights_;
};

// log-softmax of `token`, and the `count` likeliest tokens.
std::vector<TokenLogprob> top_logprobs(std::span<const float> logits, size_t count);
float logprob_of(std::span<const float> logits, Token token);

}  // namespace kindred::engine
