#include "cli/engine_watch.h"

#include <gtest/gtest.h>

#include <utility>

namespace kindred::cli {
namespace {

using std::chrono::seconds;

constexpr std::chrono::steady_clock::time_point kBegin{};

EngineSample sample(int second, std::pair<double, double> prompt_tokens, std::pair<double, double> running = {0, 0},
                    std::pair<double, double> kv = {0, 0}) {
  return {.at = kBegin + seconds(second),
          .prompt_tokens = {{"0", prompt_tokens.first}, {"1", prompt_tokens.second}},
          .running = {{"0", running.first}, {"1", running.second}},
          .kv = {{"0", kv.first}, {"1", kv.second}}};
}

TEST(EngineWatch, ReadsAWorkersPage) {
  const EngineSample read = read_engine_sample(
      "# HELP vllm:num_requests_running x\n"
      "vllm:num_requests_running{model_name=\"m\",engine=\"0\"} 2\n"
      "vllm:num_requests_running{model_name=\"m\",engine=\"1\"} 1\n"
      "vllm:num_requests_waiting{model_name=\"m\",engine=\"1\"} 4\n"
      "vllm:kv_cache_usage_perc{model_name=\"m\",engine=\"0\"} 0.25\n"
      "kindred_prompt_tokens_evaluated_total{model_name=\"m\",engine=\"1\"} 700\n"
      "vllm:num_preemptions_total{model_name=\"m\",engine=\"0\"} 3\n"
      "kindred_paced_steps_total 100\n"
      "kindred_pace_overruns_total 5\n",
      kBegin);
  EXPECT_EQ(read.in_engines(), 7);
  EXPECT_EQ(read.kv.at("0"), 0.25);
  EXPECT_EQ(read.prompt_tokens.at("1"), 700);
  EXPECT_EQ(read.preemptions, 3);
  EXPECT_EQ(read.paced_steps, 100);
  EXPECT_EQ(read.pace_overruns, 5);
}

TEST(EngineWatch, GapIsPerSecondWhoeverIsAhead) {
  // 100 and 300 tokens in a second, then 500 and 100 in two: gaps of 200 a second in both.
  const EngineSample samples[] = {sample(0, {1000, 0}), sample(1, {1100, 300}), sample(3, {1600, 400})};
  EXPECT_DOUBLE_EQ(engine_use(samples, kBegin + seconds(3)).gap_tokens_per_s, 200);
}

TEST(EngineWatch, MeansAreOfAnEngineWhileRequestsArrive) {
  const EngineSample samples[] = {sample(0, {0, 0}), sample(1, {100, 0}, {4, 2}, {0.5, 0.1}),
                                  sample(2, {100, 0}, {2, 0}, {0.3, 0.1}), sample(3, {100, 900}, {9, 9}, {1, 1})};
  const EngineUse use = engine_use(samples, kBegin + seconds(2));
  EXPECT_DOUBLE_EQ(use.gap_tokens_per_s, 50);
  EXPECT_DOUBLE_EQ(use.running, 2);
  EXPECT_DOUBLE_EQ(use.kv, 0.25);
}

TEST(EngineWatch, ShortRunsHaveOneWindow) {
  const EngineSample samples[] = {sample(0, {0, 0}), sample(1, {0, 80}, {1, 1})};
  EXPECT_DOUBLE_EQ(engine_use(samples, kBegin).gap_tokens_per_s, 80);
  EXPECT_DOUBLE_EQ(engine_use(std::span(samples).first(1), kBegin).running, 0);
}

}  // namespace
}  // namespace kindred::cli
