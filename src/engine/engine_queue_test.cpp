// Queue orders, optimistic admission, and what an engine says of its state.
#include <gtest/gtest.h>

#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "engine/engine_set.h"
#include "engine/test_support.h"

namespace kindred::engine {
namespace {

using test::make_job;
using test::run;
using test::submit;
using test::Submitted;
using test::TestEngine;

std::vector<Token> prompt_of(uint32_t tokens, uint32_t salt) {
  std::vector<Token> prompt;
  for (uint32_t i = 0; i < tokens; ++i) prompt.push_back(static_cast<Token>(300 + (i * 7 + salt * 131) % 2000));
  return prompt;
}

Job long_job(uint32_t prompt, uint32_t output, uint32_t salt, uint32_t choices = 1) {
  Job job = make_job(prompt_of(prompt, salt), output, 1.0, salt, choices);
  job.sampling.ignore_eos = true;
  return job;
}

EngineOptions one_at_a_time(policy::QueuePolicy policy) {
  EngineOptions options = TestEngine::small();
  options.sequences = 1;
  options.queue.policy = policy;
  return options;
}

// The order in which jobs that wait together get their first token, by index.
std::vector<size_t> served(policy::QueuePolicy policy, std::vector<Job> jobs) {
  TestEngine engine(one_at_a_time(policy));
  std::mutex mutex;
  std::vector<size_t> order;
  std::vector<std::shared_ptr<test::Listener>> listeners;
  // It holds the only sequence until all the others are there.
  Submitted blocker = submit(*engine, long_job(8, 900, 99));
  blocker.listener->wait_tokens(1);
  for (size_t i = 0; i < jobs.size(); ++i) {
    listeners.push_back(std::make_shared<test::Listener>(jobs[i].kind));
    jobs[i].on_event = [&, i, listener = listeners.back()](Event event) {
      if (std::holds_alternative<PrefillDone>(event)) {
        const std::lock_guard lock(mutex);
        order.push_back(i);
      }
      listener->take(std::move(event));
    };
    EXPECT_TRUE(engine->submit(std::move(jobs[i])).ok());
  }
  engine->cancel(blocker.id);
  for (const auto& listener : listeners) listener->wait();
  return order;
}

std::vector<Job> three_jobs() {
  std::vector<Job> jobs = {long_job(300, 2, 1), long_job(20, 2, 2), long_job(100, 2, 3)};
  jobs[0].priority = 1;
  jobs[1].priority = 2;
  jobs[2].priority = -3;
  return jobs;
}

using Order = std::vector<size_t>;

template <class Condition>
bool eventually(Condition&& condition) {
  for (int i = 0; i < 2000; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return false;
}

// Weights and activations in F32: a result depends on the shape of a batch in its last bits only, where quantised
// ones would differ visibly.
const Model& exact_model() {
  static const std::unique_ptr<Model> model = [] {
    const std::string path = ::testing::TempDir() + "queue-" + std::to_string(getpid()) + ".gguf";
    auto loaded = Model::load(test::write_dense_model(path));
    EXPECT_TRUE(loaded.ok()) << (loaded.ok() ? "" : loaded.error().message);
    std::remove(path.c_str());
    return std::move(loaded).value();
  }();
  return *model;
}

TEST(EngineQueue, AdmitsInTheOrderOfItsPolicy) {
  EXPECT_EQ(served(policy::QueuePolicy::kFcfs, three_jobs()), (Order{0, 1, 2}));
  EXPECT_EQ(served(policy::QueuePolicy::kPriority, three_jobs()), (Order{2, 0, 1}));
  EXPECT_EQ(served(policy::QueuePolicy::kSjfAging, three_jobs()), (Order{1, 2, 0}));
}

TEST(EngineQueue, WaitingTokensAreNetOfPrefixHitsAndTracesHoldWhatWasTakenIn) {
  TestEngine engine(one_at_a_time(policy::QueuePolicy::kFcfs));
  const Job known = long_job(100, 2, 5);
  run(*engine, known);
  EXPECT_EQ(engine->trace().received, std::vector<uint64_t>{});
  Job blocker = long_job(8, 900, 99);
  blocker.dispatch = 7;
  Submitted running = submit(*engine, blocker);
  running.listener->wait_tokens(1);
  Job again = known;
  again.dispatch = 8;
  Submitted waiting = submit(*engine, again);
  EXPECT_EQ(engine->trace().received, (std::vector<uint64_t>{7, 8}));  // at once
  EXPECT_GE(engine->trace().waiting, 1U);
  running.listener->wait_tokens(running.listener->tokens() + 2);  // it has been looked up by then
  const fleet::EngineTrace trace = engine->trace();
  EXPECT_EQ(trace.waiting_prefill_tokens, 100U - 96U);
  EXPECT_EQ(engine->stats().waiting_tokens, 100U);
  EXPECT_EQ(trace.running, 1U);
  EXPECT_EQ(trace.waiting, 1U);
  EXPECT_GT(trace.kv_usage, 0);
  engine->cancel(running.id);
  EXPECT_FALSE(waiting.wait().error.has_value());
  for (uint64_t i = 0; i < 2 * fleet::kReceived; ++i) {
    Job job = long_job(4, 1, 6);
    job.dispatch = i;
    run(*engine, std::move(job));
  }
  const fleet::EngineTrace last = engine->trace();
  ASSERT_EQ(last.received.size(), fleet::kReceived);
  EXPECT_EQ(last.received.back(), 2 * fleet::kReceived - 1);
  EXPECT_TRUE(eventually([&] {
    const fleet::EngineTrace idle = engine->trace();
    return idle.waiting_prefill_tokens + idle.remaining_prefill_tokens + idle.running + idle.waiting == 0;
  }));
}

EngineOptions tight() {
  EngineOptions options = TestEngine::small();
  options.kv_tokens = 256;
  options.context_tokens = 256;
  options.token_budget = 32;  // prompts and what is computed again go in chunks
  options.kv_admission = KvAdmission::kOptimistic;
  return options;
}

// Each token is one of three. Of 8,192 likely ones, some draw would be so close to the next that the last bits
// decide it; between three, a wrong KV still shows within a few tokens.
std::vector<Job> crowd() {
  std::vector<Job> jobs;
  for (uint32_t i = 0; i < 6; ++i) jobs.push_back(long_job(20 + 9 * i, 60, i + 1));
  jobs.push_back(long_job(30, 40, 20, 3));  // choices of one prompt
  jobs.back().sampling.frequency_penalty = 0.5;
  jobs[2].sampling.presence_penalty = 0.5;
  for (Job& job : jobs) job.sampling.logit_bias = {{400, 100}, {900, 100}, {1500, 100}};
  return jobs;
}

void expect_same(const std::vector<Job>& jobs, std::vector<Submitted>& crowded, TestEngine& roomy) {
  for (size_t i = 0; i < jobs.size(); ++i) {
    const test::Said alone = run(*roomy, jobs[i]), said = crowded[i].wait();
    ASSERT_TRUE(said.finished.has_value()) << i << ": " << (said.error ? said.error->message : "");
    EXPECT_EQ(said.tokens, alone.tokens) << i;
    EXPECT_EQ(said.text, alone.text) << i;
    EXPECT_EQ(said.ends, alone.ends) << i;
    EXPECT_EQ(said.finished->usage.completion_tokens, alone.finished->usage.completion_tokens);
    EXPECT_TRUE(said.prefill.has_value());
    EXPECT_EQ(said.events_behind_end, 0);
  }
}

TEST(EnginePreemption, OutputsAreThoseOfAnEngineWithRoom) {
  for (const bool cache : {true, false}) {
    EngineOptions options = tight();
    options.prefix_cache = cache;
    TestEngine engine(options, exact_model()), roomy(TestEngine::small(), exact_model());
    std::vector<Job> jobs = crowd();
    std::vector<Submitted> submitted;
    for (const Job& job : jobs) submitted.push_back(submit(*engine, job));
    expect_same(jobs, submitted, roomy);
    EXPECT_GT(engine.metric("vllm:num_preemptions_total"), 0);
    EXPECT_GT(engine.metric("kindred_recomputed_tokens_total"), 0);
    EXPECT_TRUE(eventually([&] { return engine->stats().kv_used_tokens == 0 && engine->stats().running == 0; }));
    EXPECT_EQ(roomy.metric("vllm:num_preemptions_total"), 0);
  }
}

TEST(EnginePreemption, DecodeLegsAreComputedFromTheirPrompts) {
  EngineOptions options = tight();
  options.prefix_cache = false;
  TestEngine decode(options, exact_model()), roomy(TestEngine::small(), exact_model());
  std::vector<Job> jobs = crowd();
  std::vector<Job> legs;
  for (const Job& job : jobs) {
    Job first = job;
    first.kind = Job::Kind::kPrefill;
    const test::Said said = run(*roomy, first);
    ASSERT_TRUE(said.prefill && said.prefill->kv);
    legs.push_back(job);
    legs.back().kind = Job::Kind::kDecode;
    legs.back().choices = said.prefill->choices;
    legs.back().kv = said.prefill->kv;
  }
  std::vector<Submitted> submitted;
  for (const Job& leg : legs) submitted.push_back(submit(*decode, leg));
  for (size_t i = 0; i < jobs.size(); ++i) {
    const test::Said alone = run(*roomy, jobs[i]), said = submitted[i].wait();
    ASSERT_TRUE(said.finished.has_value()) << i << ": " << (said.error ? said.error->message : "");
    for (auto& [choice, tokens] : alone.tokens) {
      EXPECT_EQ(said.tokens.at(choice), std::vector<Token>(tokens.begin() + 1, tokens.end())) << i;
    }
  }
  EXPECT_GT(decode.metric("vllm:num_preemptions_total"), 0);
}

TEST(EnginePreemption, WhatIsComputedAgainIsNotCountedAgain) {
  TestEngine engine(tight());
  std::vector<Submitted> submitted;
  for (uint32_t i = 0; i < 6; ++i) {
    Job job = long_job(30 + 5 * i, 60, i + 1);
    job.decode_counts = true;
    submitted.push_back(submit(*engine, std::move(job)));
  }
  for (uint32_t i = 0; i < 6; ++i) {
    const test::Said said = submitted[i].wait();
    ASSERT_TRUE(said.finished && said.finished->decode_counts && said.prefill && said.prefill->counts);
    EXPECT_EQ(said.prefill->counts->tokens, 30 + 5 * i);
    EXPECT_EQ(said.finished->decode_counts->tokens, 59U);
    EXPECT_TRUE(said.finished->decode_counts->rows_sum_to_tokens());
  }
  EXPECT_GT(engine.metric("vllm:num_preemptions_total"), 0);
}

TEST(EnginePreemption, AJobThatNeedsEveryCellEnds) {
  TestEngine engine(tight(), exact_model());
  const Job job = long_job(128, 128, 3);  // its prompt is whole blocks, which stay cached
  const test::Said first = run(*engine, job);
  ASSERT_TRUE(first.finished.has_value());
  EXPECT_EQ(first.tokens.at(0).size(), 128U);
  const test::Said second = run(*engine, job);
  EXPECT_EQ(second.tokens, first.tokens);
}

TEST(EnginePreemption, CancelledWhileItWaitsToGoOn) {
  TestEngine engine(tight());
  std::vector<Submitted> submitted;
  for (uint32_t i = 0; i < 8; ++i) submitted.push_back(submit(*engine, long_job(40, 200, i + 1)));
  for (int i = 0; i < 2000 && engine.metric("vllm:num_preemptions_total") < 2; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_GE(engine.metric("vllm:num_preemptions_total"), 2);
  for (const Submitted& one : submitted) engine->cancel(one.id);
  for (Submitted& one : submitted) {
    const test::Said said = one.wait();
    EXPECT_TRUE(said.error.has_value() || said.finished.has_value());
    EXPECT_EQ(said.events_behind_end, 0);
  }
  run(*engine, long_job(4, 1, 1));  // behind all cancellations
  EXPECT_TRUE(
      eventually([&] { return engine->stats().kv_used_tokens == 0 && engine->stats().waiting_prefill_tokens == 0; }));
}

TEST(EngineSet, SharesTheModelAndRefusesWhatMemoryDoesNotHold) {
  Registry metrics;
  EngineOptions options = TestEngine::small();
  const auto start = [&](uint32_t count, std::optional<uint64_t> bytes) {
    return EngineSet::start(test::bundled_model(), options, count, test::system_clock(), metrics,
                            [bytes] { return bytes; });
  };
  const auto three = start(3, uint64_t{1} << 40);
  ASSERT_TRUE(three.ok());
  const test::Said first = run(*three->engines()[0], long_job(20, 12, 4));
  for (Engine* engine : three->engines()) {
    EXPECT_EQ(run(*engine, long_job(20, 12, 4)).tokens, first.tokens);
    EXPECT_GT(engine->kv_bytes(), options.kv_tokens);
  }
  EXPECT_EQ(three->engines()[2]->options().rank, 2U);
  const uint64_t kv = three->engines()[0]->kv_bytes();
  EXPECT_TRUE(start(1, 0).ok());
  EXPECT_TRUE(start(2, std::nullopt).ok());
  const auto refused = start(4, 2 * kv);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, ErrorCode::kExhausted);
  EXPECT_EQ(refused.error().field, "data_parallel_size");
  EXPECT_NE(refused.error().message.find("MiB are available"), std::string::npos) << refused.error().message;
}

}  // namespace
}  // namespace kindred::engine
