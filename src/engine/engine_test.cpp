#include "engine/engine.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "engine/test_support.h"

namespace kindred::engine {
namespace {

using test::make_job;
using test::run;
using test::Said;
using test::submit;
using test::Submitted;
using test::TestEngine;

// Stats are published after each step; waits for what must come.
template <class Condition>
bool eventually(Condition condition) {
  for (int i = 0; i < 2000; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return false;
}

TEST(Engine, GeneratesAndReports) {
  TestEngine engine;
  const Said said = run(*engine, make_job("def add(a, b):\n    return a", 12));
  ASSERT_FALSE(said.error) << said.error->message;
  ASSERT_TRUE(said.prefill && said.finished);
  EXPECT_EQ(said.tokens.at(0).size(), said.finished->usage.completion_tokens);
  EXPECT_EQ(said.prefill->usage.completion_tokens, 1U);
  EXPECT_EQ(said.prefill->choices.at(0).generated.size(), 1U);
  EXPECT_FALSE(said.prefill->kv);
  EXPECT_EQ(said.finished->reasons, std::vector<FinishReason>{said.ends.at(0)});
  const auto size = static_cast<double>(said.prefill->usage.prompt_tokens);
  EXPECT_EQ(engine.metric("vllm:prompt_tokens_total"), size);
  EXPECT_EQ(engine.metric("kindred_prompt_tokens_evaluated_total"), size);
  EXPECT_EQ(engine.metric("vllm:generation_tokens_total"), said.finished->usage.completion_tokens);
  EXPECT_EQ(engine.metric("kindred_decode_steps_total"), said.finished->usage.completion_tokens - 1);
  EXPECT_EQ(engine.metric("kindred_decode_sequences_total"), said.finished->usage.completion_tokens - 1);
  // One sequence selects exactly top-k experts in each layer.
  EXPECT_EQ(engine.metric("kindred_decode_active_experts_total"), 4.0 * (said.finished->usage.completion_tokens - 1));
  EXPECT_EQ(engine.metric("kindred_captured_rows_lost_total"), 0);
}

TEST(Engine, MaxTokensStopStringsAndEndTokensEndAChoice) {
  TestEngine engine;
  const Job plain = make_job("The quick brown fox", 30);
  const Said whole = run(*engine, plain);
  EXPECT_EQ(whole.ends.at(0), FinishReason::kLength);
  ASSERT_GE(whole.text.at(0).size(), 10U);

  Job stopped = plain;
  stopped.stop = {whole.text.at(0).substr(4, 3)};
  const Said cut = run(*engine, stopped);
  EXPECT_EQ(cut.ends.at(0), FinishReason::kStop);
  EXPECT_EQ(cut.text.at(0), whole.text.at(0).substr(0, whole.text.at(0).find(stopped.stop[0])));

  const Token end = test::bundled_model().tokenize("<|im_end|>", true).at(0);
  Job ends = plain;
  ends.sampling.logit_bias = {{end, 100}};
  const Said ended = run(*engine, ends);
  EXPECT_EQ(ended.tokens.at(0), std::vector<Token>{end});
  EXPECT_EQ(ended.text.at(0), "");
  EXPECT_EQ(ended.ends.at(0), FinishReason::kStop);
  ends.sampling.min_tokens = 3;
  const Said later = run(*engine, ends);
  EXPECT_EQ(later.tokens.at(0).size(), 4U);
  EXPECT_EQ(later.tokens.at(0).back(), end);
  ends.sampling.min_tokens = 0;
  ends.sampling.ignore_eos = true;
  EXPECT_EQ(run(*engine, ends).tokens.at(0), std::vector<Token>(30, end));
}

TEST(Engine, ChoicesShareThePromptAndDifferBySeed) {
  TestEngine engine;
  const Said three = run(*engine, make_job("Once upon a time", 20, 1.0, 5, 3));
  ASSERT_EQ(three.tokens.size(), 3U);
  EXPECT_NE(three.tokens.at(0), three.tokens.at(1));
  EXPECT_EQ(engine.metric("kindred_prompt_tokens_evaluated_total"), three.prefill->usage.prompt_tokens);
  EXPECT_TRUE(eventually([&] { return engine->stats().running == 0; }));
  EXPECT_EQ(engine->stats().kv_used_tokens, 0U);
}

TEST(Engine, ManyAtOnceAllEnd) {
  TestEngine engine;
  std::vector<Submitted> jobs;
  for (int i = 0; i < 30; ++i) {
    Job job = make_job(std::vector<Token>(static_cast<size_t>(10 + 31 * (i % 9)), 200 + i), 12, i % 3 * 0.5,
                       static_cast<uint64_t>(i), 1 + static_cast<uint32_t>(i) % 3);
    job.sampling.ignore_eos = true;
    jobs.push_back(submit(*engine, std::move(job)));
  }
  for (Submitted& job : jobs) {
    const Said said = job.wait();
    ASSERT_FALSE(said.error) << said.error->message;
    for (const auto& [choice, tokens] : said.tokens) EXPECT_EQ(tokens.size(), 12U);
    EXPECT_TRUE(said.prefill->counts->rows_sum_to_tokens());
  }
  EXPECT_TRUE(eventually([&] { return engine->stats().kv_used_tokens == 0; }));
}

TEST(Engine, CancelFreesKvWithinAStep) {
  TestEngine engine;
  Job job = make_job("A long story", 900);
  job.sampling.ignore_eos = true;
  Submitted running = submit(*engine, job);
  running.listener->wait_tokens(3);
  EXPECT_GT(engine->stats().kv_used_tokens, 0U);
  engine->cancel(running.id);
  const Said said = running.wait();
  ASSERT_TRUE(said.error);
  EXPECT_EQ(said.error->code, ErrorCode::kCancelled);
  EXPECT_TRUE(eventually([&] { return engine->stats().running == 0 && engine->stats().kv_used_tokens == 0; }));
  EXPECT_EQ(running.wait().events_behind_end, 0);
  engine->cancel(running.id);  // ended already
  engine->cancel(12345);       // never was
  EXPECT_FALSE(run(*engine, make_job("still here", 3)).error);
  EXPECT_EQ(engine.metric("vllm:request_success_total", "abort"), 1);
}

TEST(Engine, CancelDuringPrefillAndWhileWaiting) {
  EngineOptions options = TestEngine::small();
  options.sequences = 1;
  options.token_budget = 2;  // a prefill of some 500 steps
  TestEngine engine(options);
  Submitted prefilling = submit(*engine, make_job(std::vector<Token>(900, 77), 4));
  Submitted waiting = submit(*engine, make_job("waits", 4));
  EXPECT_TRUE(eventually([&] {
    const EngineStats stats = engine->stats();
    return stats.remaining_prefill_tokens > 0 && stats.waiting == 1 && stats.waiting_prefill_tokens > 0;
  }));
  engine->cancel(waiting.id);
  EXPECT_EQ(waiting.wait().error->code, ErrorCode::kCancelled);
  engine->cancel(prefilling.id);
  EXPECT_EQ(prefilling.wait().error->code, ErrorCode::kCancelled);
  EXPECT_TRUE(eventually([&] { return engine->stats().kv_used_tokens == 0; }));
}

TEST(Engine, DestructionCancelsWhatRunsAndWaits) {
  std::vector<Submitted> jobs;
  {
    EngineOptions options = TestEngine::small();
    options.sequences = 2;
    TestEngine engine(options);
    for (int i = 0; i < 5; ++i) {
      Job job = make_job("endless", 900);
      job.sampling.ignore_eos = true;
      jobs.push_back(submit(*engine, job));
    }
    jobs[0].listener->wait_tokens(2);
  }
  for (Submitted& job : jobs) EXPECT_EQ(job.wait().error->code, ErrorCode::kCancelled);
}

TEST(Engine, AFullQueueRefuses) {
  EngineOptions options = TestEngine::small();
  options.sequences = 1;
  options.waiting = 2;
  TestEngine engine(options);
  Job endless = make_job("endless", 900);
  endless.sampling.ignore_eos = true;
  Submitted running = submit(*engine, endless);
  running.listener->wait_tokens(1);
  EXPECT_TRUE(eventually([&] { return engine->stats().waiting == 0; }));
  Submitted second = submit(*engine, make_job("second", 2));
  Submitted third = submit(*engine, make_job("third", 2));
  EXPECT_EQ(run(*engine, make_job("fourth", 2)).error->code, ErrorCode::kExhausted);
  engine->cancel(running.id);
  EXPECT_FALSE(second.wait().error);
  EXPECT_FALSE(third.wait().error);
  EXPECT_FALSE(run(*engine, make_job("fifth", 2)).error);
}

TEST(Engine, JobsThatCannotRunAreRefusedAtOnce) {
  TestEngine engine;
  const auto refused = [&](Job job, const std::string& field) {
    job.on_event = [](const Event&) {};
    const auto id = engine->submit(std::move(job));
    ASSERT_FALSE(id.ok());
    EXPECT_EQ(id.error().code, ErrorCode::kInvalid);
    EXPECT_EQ(id.error().field, field) << id.error().message;
  };
  refused(make_job(std::vector<Token>{}, 4), "prompt");
  refused(make_job(std::vector<Token>(10, 1), 0), "max_tokens");
  refused(make_job(std::vector<Token>(1020, 1), 5), "prompt");
  refused(make_job(std::vector<Token>{1, 8192}, 4), "prompt");
  refused(make_job(std::vector<Token>{1, -1}, 4), "prompt");
  refused(make_job(std::vector<Token>{1}, 4, 0, 1, 9), "n");
  refused(make_job(std::vector<Token>{1}, 4, 0, 1, 0), "n");
  refused(make_job(std::vector<Token>(20, 1), 1000, 0, 1, 5), "max_tokens");  // 5 x 1,000 pass the 4,096 cells
  Job empty_stop = make_job("x", 4);
  empty_stop.stop = {""};
  refused(empty_stop, "stop");
  Job begun = make_job("x", 4);
  begun.choices[0].generated = {5};
  refused(begun, "choices");
  Job decode = make_job("x", 4);
  decode.kind = Job::Kind::kDecode;
  refused(decode, "kv");
  decode.kv = std::make_shared<const Bytes>(Bytes(10));
  refused(decode, "choices");
  EXPECT_FALSE(run(*engine, make_job(std::vector<Token>(1020, 1), 4)).error);  // the limit itself
}

TEST(Engine, OptionsThatCannotBeServedAreRefused) {
  Registry metrics;
  const auto start = [&](auto change) {
    EngineOptions options = TestEngine::small();
    change(options);
    return Engine::start(test::bundled_model(), options, test::system_clock(), metrics);
  };
  EXPECT_EQ(start([](EngineOptions& o) { o.sequences = 0; }).error().field, "sequences");
  EXPECT_EQ(start([](EngineOptions& o) { o.sequences = 256; }).error().field, "sequences");
  EXPECT_EQ(start([](EngineOptions& o) { o.block_tokens = 256; }).error().field, "block_tokens");
  EXPECT_EQ(start([](EngineOptions& o) { o.kv_tokens = 0; }).error().field, "kv_tokens");
  EXPECT_EQ(start([](EngineOptions& o) { o.token_budget = 0; }).error().field, "token_budget");
  const auto tight = start([](EngineOptions& o) {
    o.kv_tokens = 64;
    o.sequences = 4;
    o.token_budget = 1;
  });
  ASSERT_TRUE(tight.ok()) << tight.error().message;
  EXPECT_EQ((*tight)->options().context_tokens, 64U);
  EXPECT_FALSE(run(**tight, make_job(std::vector<Token>(40, 9), 24)).error);
}

TEST(Engine, AJobThatNeedsEveryCellRunsAlsoFromItsCachedPrompt) {
  EngineOptions options = TestEngine::small();
  options.kv_tokens = 128;
  options.context_tokens = 128;
  options.block_tokens = 32;
  TestEngine engine(options);
  const Job job = make_job(std::vector<Token>(64, 9), 33, 1.0, 1, 2);  // 64 + 2 x 32
  for (int i = 0; i < 3; ++i) {
    const Said said = run(*engine, job);
    ASSERT_FALSE(said.error) << said.error->message;
  }
  EXPECT_TRUE(eventually([&] { return engine->stats().kv_used_tokens == 0; }));
}

TEST(Engine, LogprobsComeWithTheTokens) {
  TestEngine engine;
  Job job = make_job("One two three", 4);
  job.sampling.logprobs = 2;
  const Said said = run(*engine, job);
  for (const Output& output : said.outputs) {
    ASSERT_EQ(output.top.size(), 2U);
    EXPECT_EQ(output.top[0].token, output.token);  // greedy
    EXPECT_FLOAT_EQ(output.top[0].logprob, output.logprob);
    EXPECT_LE(output.top[1].logprob, output.top[0].logprob);
    EXPECT_LT(output.logprob, 0);
  }
}

TEST(Engine, SubmitAndCancelFromManyThreads) {
  TestEngine engine;
  std::vector<std::thread> threads;
  std::atomic<int> ended = 0;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 8; ++i) {
        Submitted job = submit(*engine, make_job(std::vector<Token>(20, 50 + t), 6, 1.0, static_cast<uint64_t>(i)));
        if (i % 3 == 0) engine->cancel(job.id);
        engine->stats();
        job.wait();
        ++ended;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(ended, 32);
}

}  // namespace
}  // namespace kindred::engine
