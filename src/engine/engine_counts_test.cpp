// Expert counts of prompts: under no, partial and full prefix hits, after eviction, in batches.
//
// What the cache adds up is compared exactly. Against a cold run a gate may flip where the k-th and the
// next score are within rounding, since kernels may round differently at other batch shapes: those flips
// are counted, printed and bounded. (With the KV types of llama_session.cpp there are none on x86.)
#include <gtest/gtest.h>

#include <cstdio>
#include <numeric>

#include "base/rng.h"
#include "engine/test_support.h"

namespace kindred::engine {
namespace {

using expert::ExpertCounts;
using test::make_job;
using test::run;
using test::Said;
using test::TestEngine;

constexpr uint32_t kBlock = 16;

std::vector<Token> some_prompt(size_t size, uint64_t seed = 1) {
  // Real text, so that routing is what it is in earnest.
  static const std::vector<Token> text = test::bundled_model().tokenize(
      "def merge(left, right):\n    result = []\n    while left and right:\n        result.append(min(left[0], "
      "right[0]))\n    return result\n\nThe court held that the contract was void because no consideration had been "
      "given by the defendant. Der Vertrag ist nichtig. Il contratto è nullo. Le contrat est nul. 契約は無効です。",
      false);
  Rng rng(seed);
  std::vector<Token> prompt;
  while (prompt.size() < size) {
    const size_t from = rng.below(text.size() - 8);
    prompt.insert(prompt.end(), text.begin() + static_cast<std::ptrdiff_t>(from),
                  text.begin() + static_cast<std::ptrdiff_t>(from + 8));
  }
  prompt.resize(size);
  return prompt;
}

ExpertCounts difference(const ExpertCounts& a, const ExpertCounts& b) {
  ExpertCounts result(a.shape);
  result.tokens = a.tokens - b.tokens;
  for (size_t i = 0; i < a.data.size(); ++i) result.data[i] = a.data[i] - b.data[i];
  return result;
}

// Selections that differ: half of the L1 distance.
uint64_t flips(const ExpertCounts& a, const ExpertCounts& b) {
  uint64_t distance = 0;
  for (size_t i = 0; i < a.data.size(); ++i)
    distance += a.data[i] > b.data[i] ? a.data[i] - b.data[i] : b.data[i] - a.data[i];
  return distance / 2;
}

void expect_same_but_for_rounding(const ExpertCounts& got, const ExpertCounts& cold, const char* what) {
  ASSERT_EQ(got.tokens, cold.tokens);
  const uint64_t selections = cold.tokens * cold.shape.top_k * cold.shape.layers.size();
  const uint64_t flipped = flips(got, cold);
  std::printf("%s: %lu of %lu selections differ from a cold run\n", what, static_cast<unsigned long>(flipped),
              static_cast<unsigned long>(selections));
  EXPECT_LE(flipped, 8 + selections / 50) << what;
}

Said cold(Engine& engine, std::vector<Token> prompt) {
  Job job = make_job(std::move(prompt), 1);
  job.prefix_cache = false;
  return run(engine, std::move(job));
}

TEST(EngineCounts, EveryPromptTokenSelectsTopKInEveryCapturedLayer) {
  TestEngine engine;
  for (const size_t size : {1U, 2U, 15U, 16U, 17U, 127U, 128U, 129U, 400U}) {
    const Said said = cold(*engine, some_prompt(size));
    ASSERT_TRUE(said.prefill && said.prefill->counts) << size;
    const ExpertCounts& counts = *said.prefill->counts;
    EXPECT_EQ(counts.shape, test::bundled_model().info().experts);
    EXPECT_EQ(counts.tokens, size);
    EXPECT_TRUE(counts.rows_sum_to_tokens()) << size;
    EXPECT_EQ(counts.data, said.prefill->suffix->data);
  }
  EXPECT_EQ(engine.metric("kindred_captured_rows_lost_total"), 0);
}

TEST(EngineCounts, OfAFullHitAreThoseStored) {
  TestEngine engine;
  for (const uint32_t size : {kBlock, 6 * kBlock, 20 * kBlock}) {
    const auto prompt = some_prompt(size, size);
    const Said first = run(*engine, make_job(prompt, 2));
    const Said again = run(*engine, make_job(prompt, 2));
    EXPECT_EQ(first.prefill->usage.cached_tokens, 0U);
    EXPECT_EQ(again.prefill->usage.cached_tokens, size - 1);
    EXPECT_EQ(again.prefill->counts->data, first.prefill->counts->data);  // the last token is not counted twice
    EXPECT_EQ(again.prefill->counts->tokens, size);
    EXPECT_EQ(again.prefill->suffix->tokens, 1U);
    EXPECT_TRUE(again.prefill->suffix->rows_sum_to_tokens());
    EXPECT_EQ(again.tokens, first.tokens);
  }
  EXPECT_EQ(engine.metric("vllm:prefix_cache_queries_total"), 2 * 27 * kBlock);
  EXPECT_EQ(engine.metric("vllm:prefix_cache_hits_total"), 27 * kBlock - 3);
  EXPECT_EQ(engine.metric("kindred_prompt_tokens_evaluated_total"), 27 * kBlock + 3);
}

TEST(EngineCounts, OfAPartialHitAreThePrefixAndTheRest) {
  TestEngine engine;
  const auto base = some_prompt(100, 7);  // six blocks and four tokens
  const Said first = run(*engine, make_job(base, 1));
  const std::vector<Token> prefix(base.begin(), base.begin() + 96);
  const ExpertCounts stored = *run(*engine, make_job(prefix, 1)).prefill->counts;
  for (const size_t shared : {16U, 40U, 96U, 100U}) {
    std::vector<Token> prompt(base.begin(), base.begin() + static_cast<std::ptrdiff_t>(shared));
    const auto tail = some_prompt(75, shared);
    prompt.insert(prompt.end(), tail.begin(), tail.end());
    const Said said = run(*engine, make_job(prompt, 1));
    const auto cached = static_cast<uint32_t>(shared / kBlock * kBlock);
    EXPECT_EQ(said.prefill->usage.cached_tokens, cached);
    const ExpertCounts& counts = *said.prefill->counts;
    EXPECT_TRUE(counts.rows_sum_to_tokens());
    EXPECT_TRUE(said.prefill->suffix->rows_sum_to_tokens());
    EXPECT_EQ(said.prefill->suffix->tokens, prompt.size() - cached);
    const ExpertCounts from_cache = difference(counts, *said.prefill->suffix);
    EXPECT_TRUE(from_cache.rows_sum_to_tokens());
    if (cached == 96) {
      EXPECT_EQ(from_cache.data, stored.data);
    }
    expect_same_but_for_rounding(counts, *cold(*engine, prompt).prefill->counts, "partial hit");
  }
}

TEST(EngineCounts, AfterEvictionAreThoseOfAColdRun) {
  EngineOptions options = TestEngine::small();
  options.kv_tokens = 512;
  options.context_tokens = 512;
  TestEngine engine(options);
  const auto prompt = some_prompt(200, 3);
  const Said first = run(*engine, make_job(prompt, 4));
  for (uint64_t i = 0; i < 6; ++i) ASSERT_FALSE(run(*engine, make_job(some_prompt(300, 100 + i), 4)).error);
  EXPECT_GT(engine.metric("kindred_prefix_cache_evicted_blocks_total"), 0);
  const Said evicted = run(*engine, make_job(prompt, 4));
  EXPECT_LT(evicted.prefill->usage.cached_tokens, 199U);
  EXPECT_TRUE(evicted.prefill->counts->rows_sum_to_tokens());
  expect_same_but_for_rounding(*evicted.prefill->counts, *first.prefill->counts, "after eviction");

  engine->drop_prefix_cache();
  const Said dropped = run(*engine, make_job(prompt, 4));
  EXPECT_EQ(dropped.prefill->usage.cached_tokens, 0U);
  EXPECT_EQ(dropped.prefill->counts->data, first.prefill->counts->data);  // the same batches: the same bits
  EXPECT_EQ(dropped.tokens, first.tokens);
}

TEST(EngineCounts, InMixedBatchesBelongToTheirOwnJob) {
  TestEngine engine;
  std::vector<test::Submitted> jobs;
  std::vector<std::vector<Token>> prompts;
  for (uint64_t i = 0; i < 12; ++i) {
    prompts.push_back(some_prompt(20 + 37 * (i % 5), i % 4));  // some equal, some prefixes of others
    jobs.push_back(test::submit(*engine, make_job(prompts.back(), 5)));
  }
  for (size_t i = 0; i < jobs.size(); ++i) {
    const Said said = jobs[i].wait();
    ASSERT_FALSE(said.error) << said.error->message;
    EXPECT_TRUE(said.prefill->counts->rows_sum_to_tokens());
    expect_same_but_for_rounding(*said.prefill->counts, *cold(*engine, prompts[i]).prefill->counts, "mixed batch");
  }
}

TEST(EngineCounts, OfDecodeAreTokensThatWereFedBack) {
  TestEngine engine;
  Job job = make_job(some_prompt(30), 9, 1.0, 3, 2);
  job.sampling.ignore_eos = true;
  job.decode_counts = true;
  const Said said = run(*engine, job);
  ASSERT_TRUE(said.finished && said.finished->decode_counts);
  EXPECT_EQ(said.finished->decode_counts->tokens, 2U * 8U);  // the last one of each is not
  EXPECT_TRUE(said.finished->decode_counts->rows_sum_to_tokens());
}

Job gated(std::vector<Token> prompt) {
  Job job = make_job(std::move(prompt), 2);
  job.gates = true;
  return job;
}

TEST(EngineGates, SumTheProbabilitiesOfAllExpertsOverThePrompt) {
  TestEngine engine;
  const auto prompt = some_prompt(300, 5);  // three steps
  const Said said = run(*engine, gated(prompt));
  ASSERT_TRUE(said.prefill && said.prefill->gates);
  const expert::ExpertGates& gates = *said.prefill->gates;
  const ExpertCounts& counts = *said.prefill->counts;
  EXPECT_EQ(gates.layers, counts.shape.layers);
  ASSERT_EQ(gates.data.size(), counts.data.size());
  for (size_t l = 0; l < gates.layers.size(); ++l) {
    const auto row = std::span(gates.data).subspan(l * gates.experts, gates.experts);
    const double sum = std::accumulate(row.begin(), row.end(), 0.0);
    EXPECT_NEAR(sum, 300, 0.01) << l;  // a softmax gate
    // The four largest of 64 probabilities are more than four sixty-fourths.
    double selected = 0;
    for (size_t e = 0; e < row.size(); ++e) selected += counts.row(l)[e] > 0 ? static_cast<double>(row[e]) : 0;
    EXPECT_GT(selected, 300.0 * 4 / 64);
  }
}

TEST(EngineGates, OfOneTokenAreLargestWhereItGoes) {
  TestEngine engine;
  const Said said = run(*engine, gated({100}));
  ASSERT_TRUE(said.prefill->gates);
  const ExpertCounts& counts = *said.prefill->counts;
  for (size_t l = 0; l < counts.shape.layers.size(); ++l) {
    float least_selected = 1, most_other = 0;
    for (size_t e = 0; e < counts.shape.experts; ++e) {
      const float gate = said.prefill->gates->data[l * counts.shape.experts + e];
      if (counts.row(l)[e] > 0) {
        least_selected = std::min(least_selected, gate);
      } else {
        most_other = std::max(most_other, gate);
      }
    }
    EXPECT_GE(least_selected, most_other);
  }
}

TEST(EngineGates, AreNotTakenFromTheCacheButFillIt) {
  TestEngine engine;
  const auto prompt = some_prompt(100, 6);
  const Said first = run(*engine, gated(prompt));
  const Said again = run(*engine, gated(prompt));
  EXPECT_EQ(again.prefill->usage.cached_tokens, 0U);
  EXPECT_EQ(again.prefill->gates, first.prefill->gates);
  const Said plain = run(*engine, make_job(prompt, 2));
  EXPECT_EQ(plain.prefill->usage.cached_tokens, 96U);
  EXPECT_FALSE(plain.prefill->gates);
  EXPECT_EQ(plain.tokens, first.tokens);
  EXPECT_EQ(plain.prefill->counts->data, first.prefill->counts->data);
}

TEST(EngineGates, InMixedBatchesBelongToTheirOwnJob) {
  TestEngine engine;
  std::vector<test::Submitted> jobs;
  std::vector<std::vector<Token>> prompts;
  for (uint64_t i = 0; i < 8; ++i) {
    prompts.push_back(some_prompt(20 + 50 * (i % 4), i));
    jobs.push_back(test::submit(*engine, i % 2 == 0 ? gated(prompts.back()) : make_job(prompts.back(), 4)));
  }
  TestEngine alone;
  for (size_t i = 0; i < jobs.size(); ++i) {
    const Said said = jobs[i].wait();
    ASSERT_EQ(said.prefill->gates.has_value(), i % 2 == 0);
    if (i % 2 != 0) continue;
    const Said cold = run(*alone, gated(prompts[i]));
    for (size_t c = 0; c < cold.prefill->gates->data.size(); ++c)
      ASSERT_NEAR(said.prefill->gates->data[c], cold.prefill->gates->data[c], 0.05) << i;
  }
}

TEST(EngineCounts, CanBeTurnedOff) {
  EngineOptions options = TestEngine::small();
  options.capture_experts = false;
  TestEngine engine(options);
  const Said said = run(*engine, make_job(some_prompt(40), 2));
  EXPECT_FALSE(said.error);
  EXPECT_FALSE(said.prefill->counts);
  EXPECT_EQ(run(*engine, make_job(some_prompt(40), 2)).prefill->usage.cached_tokens, 32U);
}

TEST(EngineCounts, TheCacheCanBeDeclined) {
  TestEngine engine;
  Job job = make_job(some_prompt(64), 1);
  job.prefix_cache = false;
  run(*engine, job);
  EXPECT_EQ(engine->stats().kv_cached_tokens, 0U);
  EXPECT_EQ(run(*engine, job).prefill->usage.cached_tokens, 0U);
}

}  // namespace
}  // namespace kindred::engine
