// The handoff: prefill in one engine, decode in another, same output as in a single one.
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <thread>

#include "base/rng.h"
#include "engine/kv_blob.h"
#include "engine/test_support.h"

namespace kindred::engine {
namespace {

using test::make_job;
using test::run;
using test::run_handoff;
using test::Said;
using test::TestEngine;

class EngineHandoff : public testing::Test {
 protected:
  TestEngine whole, prefill, decode;

  void expect_same(const Job& job, const std::string& what) {
    const Said expected = run(*whole, job);
    const Said got = run_handoff(*prefill, *decode, job);
    ASSERT_FALSE(expected.error) << what << ": " << expected.error->message;
    ASSERT_FALSE(got.error) << what << ": " << got.error->message;
    EXPECT_EQ(got.tokens, expected.tokens) << what;
    EXPECT_EQ(got.text, expected.text) << what;
    EXPECT_EQ(got.ends, expected.ends) << what;
    if (got.finished) {
      EXPECT_EQ(got.finished->usage.completion_tokens, expected.finished->usage.completion_tokens) << what;
      EXPECT_EQ(got.finished->usage.prompt_tokens, expected.finished->usage.prompt_tokens) << what;
      EXPECT_EQ(got.finished->reasons, expected.finished->reasons) << what;
    }
  }
  void TearDown() override { EXPECT_EQ(decode.metric("kindred_prompt_tokens_evaluated_total"), 0); }
};

std::vector<Token> tokens_of(size_t size) {
  std::vector<Token> tokens(size);
  for (size_t i = 0; i < size; ++i) tokens[i] = static_cast<Token>(300 + i * 7919 % 7000);
  return tokens;
}

TEST_F(EngineHandoff, OfPromptsFromOneTokenToTheContextLimit) {
  for (const size_t size : {1U, 2U, 15U, 16U, 17U, 127U, 128U, 129U, 300U, 1000U, 1022U}) {
    const auto most = static_cast<uint32_t>(std::min<size_t>(24, 1024 - size));
    expect_same(make_job(tokens_of(size), most), "greedy, " + std::to_string(size));
    expect_same(make_job(tokens_of(size), most, 1.0, size), "seeded, " + std::to_string(size));
  }
}

TEST_F(EngineHandoff, OfRealTextWithPenaltiesAndTopP) {
  uint64_t seed = 0;
  for (const char* text : {"def quicksort(items):\n", "Die Würde des Menschen ist", "Пользователь может",
                           "日本語の文書", "Solve for x: 3x + 5 = 20."}) {
    Job job = make_job(text, 40, 0.8, ++seed);
    job.sampling.top_p = 0.9;
    job.sampling.frequency_penalty = 0.5;
    job.sampling.presence_penalty = 0.3;
    job.sampling.repetition_penalty = 1.2;
    job.sampling.min_tokens = 10;
    job.sampling.logprobs = 1;
    expect_same(job, text);
    expect_same(make_job(text, 40), text);
  }
}

TEST_F(EngineHandoff, OfSeveralChoices) {
  expect_same(make_job("There was once", 20, 1.0, 9, 3), "n = 3");
  expect_same(make_job(tokens_of(200), 12, 1.3, 17, 8), "n = 8");
}

TEST_F(EngineHandoff, OfStopStringsThatStraddle) {
  for (const char* text : {"def quicksort(items):\n", "Die Würde des Menschen ist", "日本語の文書"}) {
    Job job = make_job(text, 24);
    const Said plain = run(*whole, job);
    std::string output;
    for (const Output& each : plain.outputs) output += each.piece;
    const size_t first = plain.outputs[0].piece.size();
    // Every stop string that begins in the first token and ends behind it, and some that do not stop.
    for (size_t begin = 0; begin < first; ++begin) {
      for (const size_t end : {first + 1, first + 2, first + 9}) {
        job.stop = {output.substr(begin, end - begin)};
        expect_same(job, "stop '" + job.stop[0] + "'");
        job.stop = {output.substr(begin, end - begin) + "\x01"};
        expect_same(job, "no stop");
      }
    }
  }
}

TEST_F(EngineHandoff, IsNotNeededWhenPrefillEndsIt) {
  const Token end = test::bundled_model().tokenize("<|im_end|>", true).at(0);
  Job ends = make_job("Bye", 10);
  ends.kind = Job::Kind::kPrefill;
  ends.sampling.logit_bias = {{end, 100}};
  Said said = run(*prefill, ends);
  EXPECT_FALSE(said.prefill->kv);
  EXPECT_EQ(said.prefill->choices.at(0).finish, FinishReason::kStop);
  Job one = make_job("Bye", 1);
  one.kind = Job::Kind::kPrefill;
  said = run(*prefill, one);
  EXPECT_FALSE(said.prefill->kv);
  EXPECT_EQ(said.prefill->choices.at(0).finish, FinishReason::kLength);
  EXPECT_EQ(said.ends.at(0), FinishReason::kLength);
  // One of several ends at prefill, the others go on.
  for (uint64_t seed = 0; seed < 6; ++seed) {
    Job some = make_job("Bye", 8, 1.0, seed, 4);
    some.sampling.logit_bias = {{end, 6}};
    expect_same(some, "some end at prefill");
  }
}

TEST_F(EngineHandoff, WorksFromAFullPrefixHitAndTwice) {
  const Job job = make_job(tokens_of(160), 10);
  const Said expected = run(*whole, job);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(run_handoff(*prefill, *decode, job).tokens, expected.tokens);
    EXPECT_EQ(decode->stats().kv_cached_tokens, 0U);  // imported KV is not cached
  }
  EXPECT_EQ(prefill.metric("vllm:prefix_cache_hits_total"), 2 * 159);
}

TEST_F(EngineHandoff, WorksBesideOthers) {
  // Cells of other sequences lie before, between and behind; the tokens stay the same.
  const Job job = make_job(tokens_of(60), 30);
  const Said expected = run(*whole, job);
  std::vector<test::Submitted> others;
  for (int i = 0; i < 4; ++i) {
    Job other = make_job(tokens_of(static_cast<size_t>(50 + 40 * i)), 120, 1.0, static_cast<uint64_t>(i));
    other.sampling.ignore_eos = true;
    other.kind = Job::Kind::kPrefill;
    const Said half = run(*prefill, other);
    other.kind = Job::Kind::kDecode;
    other.choices = half.prefill->choices;
    other.kv = half.prefill->kv;
    others.push_back(test::submit(*decode, other));
  }
  Said got = run_handoff(*prefill, *decode, job);
  ASSERT_FALSE(got.error);
  EXPECT_EQ(got.tokens.at(0).size(), expected.tokens.at(0).size());
  size_t same = 0;
  while (same < got.tokens.at(0).size() && got.tokens.at(0)[same] == expected.tokens.at(0)[same]) ++same;
  std::printf("beside others: %zu of %zu tokens before the first difference\n", same, expected.tokens.at(0).size());
  for (auto& other : others) EXPECT_FALSE(other.wait().error);
  // Alone again, in a cache with holes.
  EXPECT_EQ(run_handoff(*prefill, *decode, job).tokens, expected.tokens);
}

class EngineBadBlob : public testing::Test {
 protected:
  void SetUp() override {
    job = make_job(tokens_of(40), 6);
    expected = run(*engine, job);
    Job first = job;
    first.kind = Job::Kind::kPrefill;
    const Said said = run(*engine, first);
    blob = *said.prefill->kv;
    decode_job = job;
    decode_job.kind = Job::Kind::kDecode;
    decode_job.choices = said.prefill->choices;
  }
  void TearDown() override {
    decode_job.kv = std::make_shared<const Bytes>(blob);
    const Said said = run(*engine, decode_job);
    ASSERT_FALSE(said.error) << said.error->message;
    EXPECT_EQ(said.tokens.at(0), std::vector<Token>(expected.tokens.at(0).begin() + 1, expected.tokens.at(0).end()));
    // Stats follow the last event by a moment.
    for (int i = 0; i < 1000 && engine->stats().running > 0; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_EQ(engine->stats().running, 0U);
    EXPECT_EQ(engine->stats().kv_used_tokens, 0U);
  }
  std::optional<Error> decode(Bytes bytes) {
    decode_job.kv = std::make_shared<const Bytes>(std::move(bytes));
    return run(*engine, decode_job).error;
  }
  void expect_corrupt(Bytes bytes, const std::string& what) {
    const auto error = decode(std::move(bytes));
    ASSERT_TRUE(error) << what;
    EXPECT_EQ(error->code, ErrorCode::kCorrupt) << what << ": " << error->message;
  }

  TestEngine engine;
  Job job, decode_job;
  Said expected;
  Bytes blob;
};

TEST_F(EngineBadBlob, TruncatedOrTooLong) {
  for (size_t size = 0; size < blob.size(); size = size < 600 ? size + 7 : size * 2) {
    expect_corrupt(Bytes(blob.begin(), blob.begin() + static_cast<std::ptrdiff_t>(size)), std::to_string(size));
  }
  Bytes longer = blob;
  longer.push_back(0);
  expect_corrupt(longer, "one byte more");
}

TEST_F(EngineBadBlob, FlippedBitsInItsStructure) {
  const size_t head = 16 + 40 * 12 + 8 + 12;  // header, cells, layer table, the first layer's types
  for (size_t at = 0; at < head; ++at) {
    const bool source_id = (at >= 4 && at < 8) || (at >= 16 && at < 16 + 40 * 12 && (at - 16) % 12 >= 8);
    if (source_id) continue;  // says nothing on this side
    Bytes damaged = blob;
    damaged[at] ^= static_cast<uint8_t>(1U << (at % 8));
    expect_corrupt(damaged, "byte " + std::to_string(at));
  }
}

TEST_F(EngineBadBlob, RandomDamageNeverHarmsTheEngine) {
  Rng rng(8);
  for (int round = 0; round < 60; ++round) {
    Bytes damaged = blob;
    for (uint64_t i = 0; i <= rng.below(50); ++i) damaged[rng.below(damaged.size())] = static_cast<uint8_t>(rng.next());
    decode(std::move(damaged));  // an error or other tokens; the hash of the lease is what tells
  }
  Bytes noise(blob.size());
  for (uint8_t& byte : noise) byte = static_cast<uint8_t>(rng.next());
  expect_corrupt(noise, "noise");
}

TEST_F(EngineBadBlob, ValuesThatAreNotNumbers) {
  Bytes damaged = blob;
  const uint16_t nan = 0x7fc0;  // bf16
  std::memcpy(damaged.data() + damaged.size() - 64, &nan, sizeof(nan));
  expect_corrupt(damaged, "NaN");
}

TEST_F(EngineBadBlob, OfAnotherPrompt) {
  Job other = make_job(tokens_of(41), 6);
  other.kind = Job::Kind::kPrefill;
  expect_corrupt(*run(*engine, other).prefill->kv, "41 tokens for 40");
}

TEST_F(EngineBadBlob, PositionsMustBeThoseOfThePrompt) {
  Bytes damaged = blob;
  std::memcpy(damaged.data() + 16 + 12, damaged.data() + 16, 4);  // position 0 twice
  expect_corrupt(damaged, "a position twice");
}

TEST(KvLayout, IsLearnt) {
  Registry metrics;
  TestEngine engine;
  Job job = make_job(tokens_of(33), 4);
  job.kind = Job::Kind::kPrefill;
  const Said said = run(*engine, job);
  const KvLayout layout = learn_kv_layout(*said.prefill->kv, 33);
  EXPECT_TRUE(layout.known);
  EXPECT_EQ(layout.keys.size(), 6U);
  EXPECT_EQ(layout.keys[0].cell_bytes, 2U * 32 * 2);    // two heads of 32, f16
  EXPECT_EQ(layout.values[0].cell_bytes, 2U * 32 * 2);  // bf16
  EXPECT_FALSE(layout.transposed);
  EXPECT_TRUE(check_kv_blob(*said.prefill->kv, layout, 33).ok());
  EXPECT_FALSE(check_kv_blob(*said.prefill->kv, layout, 32).ok());
  EXPECT_FALSE(learn_kv_layout(*said.prefill->kv, 32).known);
}

}  // namespace
}  // namespace kindred::engine
