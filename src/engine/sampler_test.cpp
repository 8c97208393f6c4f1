#include "engine/sampler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "base/rng.h"

namespace kindred::engine {
namespace {

constexpr Token kEnd = 5;
constexpr std::array<Token, 1> kEnds = {kEnd};

std::vector<float> some_logits(uint64_t seed, size_t size = 200) {
  Rng rng(seed);
  std::vector<float> logits(size);
  for (float& logit : logits) logit = static_cast<float>(rng.uniform() * 8 - 4);
  return logits;
}

Token draw(const SamplingParams& params, std::span<const float> logits, uint64_t seed = 1, uint64_t position = 0,
           std::vector<Token> prompt = {}, std::vector<Token> generated = {}) {
  auto sample = Sampler(params, kEnds, prompt, generated).sample(logits, seed, position);
  EXPECT_TRUE(sample.ok());
  return sample.ok() ? sample->token : -1;
}

SamplingParams greedy() {
  SamplingParams params;
  params.temperature = 0;
  return params;
}

TEST(Sampler, GreedyTakesTheFirstOfTheLargest) {
  EXPECT_EQ(draw(greedy(), std::vector<float>{1, 3, 3, 2}), 1);
  const auto logits = some_logits(3);
  EXPECT_EQ(draw(greedy(), logits),
            static_cast<Token>(std::max_element(logits.begin(), logits.end()) - logits.begin()));
}

TEST(Sampler, TheLargestIsFoundWhereverItIs) {
  for (const size_t size : {1U, 15U, 16U, 17U, 50U}) {
    for (size_t at = 0; at < size; ++at) {
      std::vector<float> logits(size, -2);
      logits[at] = 1;
      logits.back() = 1;  // a tie with what comes later
      EXPECT_EQ(draw(greedy(), logits), static_cast<Token>(at)) << size;
      logits[at] = std::numeric_limits<float>::quiet_NaN();
      EXPECT_FALSE(Sampler(greedy(), kEnds, {}, {}).sample(logits, 1, 0).ok()) << size << " " << at;
    }
  }
}

TEST(Sampler, BiasMovesAndForbids) {
  SamplingParams params = greedy();
  params.logit_bias = {{1, -100}, {3, 2.5}, {9999, 50}, {-4, 50}};  // tokens that do not exist are ignored
  EXPECT_EQ(draw(params, std::vector<float>{1, 3, 2, 0.1F}), 3);
}

TEST(Sampler, EndTokensWaitForMinTokens) {
  std::vector<float> logits(8, 0);
  logits[kEnd] = 10;
  logits[2] = 5;
  SamplingParams params = greedy();
  params.min_tokens = 2;
  EXPECT_EQ(draw(params, logits), 2);
  EXPECT_EQ(draw(params, logits, 1, 1, {}, {7}), 2);
  EXPECT_EQ(draw(params, logits, 1, 2, {}, {7, 7}), kEnd);
}

TEST(Sampler, PenaltiesFollowTheirDefinitions) {
  SamplingParams params = greedy();
  params.frequency_penalty = 0.5;
  params.presence_penalty = 0.25;
  // Token 0 was generated three times: 4 - 3 * 0.5 - 0.25 = 2.25.
  EXPECT_EQ(draw(params, std::vector<float>{4, 2.3F, 0}, 1, 3, {}, {0, 0, 0}), 1);
  EXPECT_EQ(draw(params, std::vector<float>{4, 2.2F, 0}, 1, 3, {}, {0, 0, 0}), 0);
  // They look at generated tokens only.
  EXPECT_EQ(draw(params, std::vector<float>{4, 3.9F, 0}, 1, 3, {0, 0, 0}), 0);

  SamplingParams repetition = greedy();
  repetition.repetition_penalty = 2;
  EXPECT_EQ(draw(repetition, std::vector<float>{4, 2.1F, 0}, 1, 0, {0}), 1);       // divides what is positive
  EXPECT_EQ(draw(repetition, std::vector<float>{-1, -1.9F, -9}, 1, 0, {0}), 1);    // multiplies the rest
  EXPECT_EQ(draw(repetition, std::vector<float>{4, 1.9F, 0}, 1, 1, {0}, {0}), 0);  // once per token
  EXPECT_EQ(draw(repetition, std::vector<float>{4, 2.1F, 0}, 1, 1, {}, {0}), 1);
}

TEST(Sampler, DrawsFromTheDistribution) {
  const std::vector<float> logits = {0, std::log(2.0F), std::log(5.0F), -std::numeric_limits<float>::infinity()};
  std::vector<int> hits(4, 0);
  constexpr int kDraws = 20000;
  for (int i = 0; i < kDraws; ++i) ++hits[static_cast<size_t>(draw({}, logits, 9, static_cast<uint64_t>(i)))];
  EXPECT_NEAR(hits[0], kDraws / 8.0, 200);
  EXPECT_NEAR(hits[1], kDraws / 4.0, 250);
  EXPECT_NEAR(hits[2], kDraws * 5 / 8.0, 300);
  EXPECT_EQ(hits[3], 0);
}

TEST(Sampler, TemperatureSharpens) {
  SamplingParams params;
  params.temperature = 0.5;  // squares the ratio
  const std::vector<float> logits = {0, std::log(3.0F)};
  int hits = 0;
  for (uint64_t i = 0; i < 10000; ++i) hits += draw(params, logits, 4, i);
  EXPECT_NEAR(hits, 9000, 150);
}

TEST(Sampler, TopPKeepsTheSmallestSetThatHoldsIt) {
  const std::vector<float> logits = {std::log(0.1F), std::log(0.4F), std::log(0.2F), std::log(0.3F)};
  const auto drawn = [&](double top_p) {
    SamplingParams params;
    params.top_p = top_p;
    std::vector<bool> seen(4, false);
    for (uint64_t i = 0; i < 2000; ++i) seen[static_cast<size_t>(draw(params, logits, 2, i))] = true;
    return seen;
  };
  EXPECT_EQ(drawn(1.0), (std::vector<bool>{true, true, true, true}));
  EXPECT_EQ(drawn(0.85), (std::vector<bool>{false, true, true, true}));
  EXPECT_EQ(drawn(0.65), (std::vector<bool>{false, true, false, true}));
  EXPECT_EQ(drawn(0.05), (std::vector<bool>{false, true, false, false}));
  EXPECT_EQ(drawn(0.0), (std::vector<bool>{false, true, false, false}));
}

TEST(Sampler, ItDoesNotMatterWhereATokenIsMade) {
  SamplingParams params;
  params.temperature = 0.9;
  params.top_p = 0.95;
  params.frequency_penalty = 0.4;
  params.repetition_penalty = 1.1;
  const std::vector<Token> prompt = {1, 2, 3};
  const auto generate = [&](std::vector<Token> generated, size_t until) {
    Sampler sampler(params, kEnds, prompt, generated);
    while (generated.size() < until) {
      const auto logits = some_logits(generated.size());
      const auto sample = sampler.sample(logits, 77, prompt.size() + generated.size());
      generated.push_back(sample->token);
    }
    return generated;
  };
  const auto whole = generate({}, 40);
  for (size_t cut = 0; cut <= 40; ++cut) EXPECT_EQ(generate(generate({}, cut), 40), whole) << cut;
}

TEST(Sampler, LogprobsAreThoseOfTheModel) {
  SamplingParams params = greedy();
  params.logprobs = 3;
  params.logit_bias = {{2, 100}};
  const std::vector<float> logits = {1, 3, -2, 3};
  const auto sample = Sampler(params, kEnds, {}, {}).sample(logits, 1, 0);
  ASSERT_TRUE(sample.ok());
  const double sum = std::log(std::exp(1) + 2 * std::exp(3) + std::exp(-2));
  EXPECT_EQ(sample->token, 2);  // the bias had its say, but not in the number reported
  EXPECT_NEAR(sample->logprob, -2 - sum, 1e-5);
  ASSERT_EQ(sample->top.size(), 3U);
  EXPECT_EQ(sample->top[0].token, 1);  // ties by id
  EXPECT_EQ(sample->top[1].token, 3);
  EXPECT_EQ(sample->top[2].token, 0);
  EXPECT_NEAR(sample->top[0].logprob, 3 - sum, 1e-5);
}

TEST(Sampler, LogitsThatAreNotNumbersAreAnError) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  for (const auto& logits : {std::vector<float>{0, nan}, std::vector<float>{nan, 1}, std::vector<float>{inf, 0},
                             std::vector<float>{-inf, -inf}}) {
    EXPECT_FALSE(Sampler({}, kEnds, {}, {}).sample(logits, 1, 0).ok());
    EXPECT_FALSE(Sampler(greedy(), kEnds, {}, {}).sample(logits, 1, 0).ok());
  }
}

}  // namespace
}  // namespace kindred::engine
