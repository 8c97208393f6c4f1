#include "policy/engine_policy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/rng.h"

namespace kindred::policy {
namespace {

std::unique_ptr<EnginePolicy> engine_policy(const std::string& name, const EnginePolicyOptions& options = {}) {
  EnginePolicyOptions named = options;
  named.name = name;
  auto made = make_engine_policy(named);
  EXPECT_TRUE(made) << (made ? "" : made.error().message);
  return *std::move(made);
}

EngineView fresh(double remaining, double waiting, double kv = 0) {
  EngineView view;
  view.trace = TraceState::kFresh;
  view.remaining_prefill_tokens = remaining;
  view.waiting_prefill_tokens = waiting;
  view.kv_usage = kv;
  return view;
}

TEST(EnginePolicy, NamesAllPoliciesAndRefusesOthers) {
  for (const std::string_view name : engine_policy_names()) {
    EXPECT_EQ(engine_policy(std::string(name))->name(), name);
  }
  const auto unknown = make_engine_policy({.name = "fastest"});
  ASSERT_FALSE(unknown);
  EXPECT_NE(unknown.error().message.find("pressure, round-robin"), std::string::npos) << unknown.error().message;
}

TEST(EnginePolicy, RefusesConstantsThatMeanNothing) {
  const auto refused = [](auto change) {
    EnginePolicyOptions options;
    change(options);
    return !make_engine_policy(options);
  };
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_TRUE(refused([](auto& o) { o.pressure.kv_high = 0; }));
  EXPECT_TRUE(refused([](auto& o) { o.pressure.kv_gap = 1.5; }));
  EXPECT_TRUE(refused([&](auto& o) { o.pressure.kv_weight = nan; }));
  EXPECT_TRUE(refused([](auto& o) { o.pressure.expert_weight = -1; }));
  EXPECT_TRUE(refused([](auto& o) { o.pressure.epsilon_tokens = -1; }));
  EXPECT_TRUE(refused([](auto& o) { o.pressure.epsilon_share = 2; }));
  EXPECT_TRUE(refused([](auto& o) { o.clients = 0; }));
  EXPECT_TRUE(refused([&](auto& o) { o.kv_lambda = nan; }));
  EXPECT_TRUE(refused([](auto& o) { o.tie_break = "none"; }));
}

TEST(EnginePolicy, NobodyIsAvailable) {
  std::vector<EngineView> engines(2);
  for (EngineView& engine : engines) engine.available = false;
  for (const std::string_view name : engine_policy_names()) {
    EXPECT_FALSE(engine_policy(std::string(name))->choose(engines, {.assigned = 1})) << name;
    EXPECT_FALSE(engine_policy(std::string(name))->choose({}, {})) << name;
  }
}

TEST(Pressure, IsTheSumOfItsTerms) {
  EngineView view = fresh(100, 200, 0.5);
  view.compensation_tokens = 300;
  view.expert_pressure = 3;
  const Pressure pressure = pressure_of(view, 2, {});
  EXPECT_DOUBLE_EQ(pressure.remaining, 100);
  EXPECT_DOUBLE_EQ(pressure.waiting, 200);
  EXPECT_DOUBLE_EQ(pressure.compensation, 300);
  EXPECT_DOUBLE_EQ(pressure.kv, 2048);
  EXPECT_DOUBLE_EQ(pressure.experts, 1024);  // half as much again as the mean
  EXPECT_DOUBLE_EQ(pressure.score(), 3672);
  EXPECT_DOUBLE_EQ(pressure_of(view, 4, {}).experts, 0);  // below the mean
  EXPECT_DOUBLE_EQ(pressure_of(view, 0, {}).experts, 0);  // nobody has experts
}

TEST(Pressure, EachTermCanBeTurnedOff) {
  EngineView view = fresh(1, 2, 0.5);
  view.compensation_tokens = 4;
  view.expert_pressure = 3;
  const double all = pressure_of(view, 2, {}).score();
  const auto without = [&](auto member) {
    PressureOptions options;
    options.*member = false;
    return all - pressure_of(view, 2, options).score();
  };
  EXPECT_DOUBLE_EQ(without(&PressureOptions::remaining), 1);
  EXPECT_DOUBLE_EQ(without(&PressureOptions::waiting), 2);
  EXPECT_DOUBLE_EQ(without(&PressureOptions::compensation), 4);
  EXPECT_DOUBLE_EQ(without(&PressureOptions::kv), 2048);
  EXPECT_DOUBLE_EQ(without(&PressureOptions::experts), 1024);
}

TEST(Pressure, TheLowestScoreWins) {
  const std::vector<EngineView> engines = {fresh(5000, 0), fresh(0, 1000), fresh(0, 9000)};
  const auto decision = engine_policy("pressure")->choose(engines, {.prompt_tokens = 500});
  ASSERT_TRUE(decision);
  EXPECT_EQ(decision->worker, 1U);
  EXPECT_EQ(decision->reason, Reason::kPressure);
  EXPECT_FLOAT_EQ(decision->scores[0], 5500);
  EXPECT_FLOAT_EQ(decision->scores[1], 1500);
}

TEST(Pressure, CloseScoresTakeTurns) {
  // Mean 2,000: 5 % of it are 100, and 128 tokens are more.
  const std::vector<EngineView> engines = {fresh(1000, 0), fresh(1128, 0), fresh(3872, 0)};
  const auto policy = engine_policy("pressure");
  std::vector<size_t> chosen;
  for (int i = 0; i < 4; ++i) {
    const auto decision = policy->choose(engines, {});
    EXPECT_EQ(decision->reason, Reason::kOrdered);
    EXPECT_EQ(decision->fallback, FallbackReason::kNone);
    chosen.push_back(decision->worker);
  }
  EXPECT_EQ(chosen, (std::vector<size_t>{0, 1, 0, 1}));
}

TEST(Pressure, EpsilonGrowsWithTheMean) {
  const std::vector<EngineView> engines = {fresh(10'000, 0), fresh(10'500, 0), fresh(11'500, 0)};
  const auto decision = engine_policy("pressure")->choose(engines, {});
  EXPECT_EQ(decision->candidates, (std::vector<uint32_t>{0, 1}));  // 5 % of 10,667 are 533
}

TEST(Pressure, NearlyFullKvComesFirst) {
  const std::vector<EngineView> engines = {fresh(0, 0, 0.95), fresh(50'000, 0, 0.6), fresh(0, 0, 0.8)};
  const auto decision = engine_policy("pressure")->choose(engines, {});
  EXPECT_EQ(decision->worker, 1U);
  EXPECT_EQ(decision->reason, Reason::kLowestKv);
}

TEST(Pressure, FullKvEverywhereIsNoReason) {
  const std::vector<EngineView> engines = {fresh(0, 0, 0.95), fresh(50'000, 0, 0.86)};
  EXPECT_EQ(engine_policy("pressure")->choose(engines, {})->worker, 0U);  // the gap is 9 %
  const std::vector<EngineView> at_the_edge = {fresh(0, 0, 0.9), fresh(50'000, 0, 0.1)};
  EXPECT_EQ(engine_policy("pressure")->choose(at_the_edge, {})->worker, 0U);  // not above 90 %
}

TEST(Pressure, ALateTraceMeansOrderedDispatch) {
  std::vector<EngineView> engines = {fresh(0, 0), fresh(90'000, 0), fresh(0, 0)};
  engines[2].trace = TraceState::kLate;
  const auto policy = engine_policy("pressure");
  for (size_t i = 0; i < 6; ++i) {
    const auto decision = policy->choose(engines, {});
    EXPECT_EQ(decision->worker, i % 3);
    EXPECT_EQ(decision->reason, Reason::kOrdered);
    EXPECT_EQ(decision->fallback, FallbackReason::kNoTrace);
  }
}

TEST(Pressure, AnEngineThatIsOutDoesNotCount) {
  std::vector<EngineView> engines = {fresh(0, 5000), fresh(90'000, 0), fresh(0, 0)};
  engines[2].trace = TraceState::kLate;
  engines[2].available = false;
  const auto decision = engine_policy("pressure")->choose(engines, {});
  EXPECT_EQ(decision->worker, 0U);
  EXPECT_EQ(decision->reason, Reason::kPressure);
}

TEST(Pressure, OneWithoutTracesCountsAsTheMean) {
  std::vector<EngineView> engines = {fresh(1000, 0), fresh(9000, 0), {}};
  auto decision = engine_policy("pressure")->choose(engines, {});
  EXPECT_EQ(decision->worker, 0U);
  EXPECT_FLOAT_EQ(decision->scores[2], 5000);
  engines[2].compensation_tokens = 20'000;  // what we know that it has to do
  decision = engine_policy("pressure")->choose(engines, {});
  EXPECT_FLOAT_EQ(decision->scores[2], 20'000);
}

TEST(Pressure, NobodyHasATrace) {
  const std::vector<EngineView> engines(3);
  const auto policy = engine_policy("pressure");
  for (size_t i = 0; i < 6; ++i) {
    const auto decision = policy->choose(engines, {});
    EXPECT_EQ(decision->worker, i % 3);
    EXPECT_EQ(decision->fallback, FallbackReason::kNoTrace);
  }
}

TEST(Pressure, WhatAnEngineHoldsNeedNotBeComputed) {
  std::vector<EngineView> engines = {fresh(0, 0), fresh(0, 2000)};
  engines[1].held_tokens = 4000;
  EXPECT_EQ(engine_policy("pressure")->choose(engines, {.prompt_tokens = 4500})->worker, 1U);
  engines[1].held_tokens = 1000;
  EXPECT_EQ(engine_policy("pressure")->choose(engines, {.prompt_tokens = 4500})->worker, 0U);
}

TEST(Pressure, AStartingWorkerGetsItsShare) {
  std::vector<EngineView> engines = {fresh(3000, 0), fresh(0, 0)};
  engines[1].share = 0.25;
  // (0 + 1000) / 0.25 - 1000 = 3000: as much as the other one has.
  EXPECT_EQ(engine_policy("pressure")->choose(engines, {.prompt_tokens = 1000})->reason, Reason::kOrdered);
  EXPECT_EQ(engine_policy("pressure")->choose(engines, {.prompt_tokens = 2000})->worker, 0U);
}

// What the fleet does between two traces: add what was sent.
void send(EngineView& engine, double tokens) {
  engine.compensation_tokens += tokens;
  engine.unseen += 1;
  engine.in_flight += 1;
}

TEST(Pressure, NoHerdingBetweenTraces) {
  for (const size_t number : {2U, 3U, 4U, 7U, 16U}) {
    for (const double tokens : {1.0, 60.0, 127.0, 500.0, 1000.0, 30'000.0}) {
      for (const double base : {0.0, 4000.0, 1e6}) {
        std::vector<EngineView> engines(number, fresh(base, 0, 0.3));
        const auto policy = engine_policy("pressure");
        for (int i = 0; i < 100; ++i) {
          send(engines[policy->choose(engines, {.prompt_tokens = tokens})->worker], tokens);
          const auto [least, most] = std::ranges::minmax(engines, {}, &EngineView::in_flight);
          ASSERT_LE(most.in_flight - least.in_flight, 1)
              << number << " engines, " << tokens << " tokens, base " << base << ", request " << i;
        }
      }
    }
  }
}

TEST(Pressure, UnlikeRequestsBalanceInTokens) {
  std::vector<EngineView> engines(4, fresh(0, 0));
  const auto policy = engine_policy("pressure");
  Rng rng(7);
  double longest = 0;
  for (int i = 0; i < 2000; ++i) {
    const double tokens = static_cast<double>(rng.below(4000)) + 1;
    longest = std::max(longest, tokens);
    send(engines[policy->choose(engines, {.prompt_tokens = tokens})->worker], tokens);
    const auto tokens_of = [](const EngineView& engine) { return engine.compensation_tokens; };
    const double least = std::ranges::min(engines, {}, tokens_of).compensation_tokens;
    const double most = std::ranges::max(engines, {}, tokens_of).compensation_tokens;
    double sum = 0;
    for (const EngineView& engine : engines) sum += engine.compensation_tokens;
    // Who is chosen is within epsilon of the least, and then has one request more.
    ASSERT_LE(most - least, longest + std::max(128.0, 0.05 * (sum / 4 + tokens)) + 1e-6);
  }
}

TEST(Pressure, WithoutCompensationItHerds) {
  std::vector<EngineView> engines = {fresh(0, 0), fresh(1000, 0)};
  EnginePolicyOptions options;
  options.pressure.compensation = false;
  const auto policy = engine_policy("pressure", options);
  for (int i = 0; i < 10; ++i) send(engines[policy->choose(engines, {.prompt_tokens = 500})->worker], 500);
  EXPECT_EQ(engines[0].in_flight, 10);
}

TEST(Baselines, RequestCountLooksAtTheLedgerOnly) {
  std::vector<EngineView> engines = {fresh(0, 0), fresh(90'000, 0)};
  engines[0].in_flight = 3;
  engines[1].in_flight = 2;
  EXPECT_EQ(engine_policy("request-count")->choose(engines, {})->worker, 1U);
}

TEST(Baselines, VllmUpTo21CountsWaitingFourTimes) {
  std::vector<EngineView> engines = {fresh(0, 0), fresh(0, 0)};
  engines[0].waiting = 1;
  engines[1].running = 3;
  const auto policy = engine_policy("vllm-0.21", {.clients = 2});
  auto decision = policy->choose(engines, {});
  EXPECT_EQ(decision->worker, 1U);
  EXPECT_FLOAT_EQ(decision->scores[0], 4);
  EXPECT_FLOAT_EQ(decision->scores[1], 3);
  engines[1].unseen = 1;  // each counts for all front ends
  decision = policy->choose(engines, {});
  EXPECT_FLOAT_EQ(decision->scores[1], 11);
}

TEST(Baselines, VllmFrom27TakesTheLargerCount) {
  std::vector<EngineView> engines = {fresh(0, 0, 0.9), fresh(0, 0, 0.4)};
  engines[0].waiting = 2;
  engines[0].running = 3;
  engines[0].in_flight = 1;
  engines[1].in_flight = 4;
  const auto decision = engine_policy("vllm-0.27", {.clients = 2})->choose(engines, {});
  EXPECT_FLOAT_EQ(decision->scores[0], 5 + 6 * 2 * 0.4F);
  EXPECT_FLOAT_EQ(decision->scores[1], 8);
  EXPECT_EQ(decision->worker, 1U);
}

TEST(Baselines, TotalTokensThenRequests) {
  std::vector<EngineView> engines = {fresh(0, 100), fresh(0, 50), fresh(0, 0)};
  engines[0].kv_used_tokens = 400;
  engines[1].kv_used_tokens = 450;
  engines[2].kv_used_tokens = 501;
  engines[0].running = 9;
  engines[1].running = 1;
  const auto policy = engine_policy("total-tokens");
  EXPECT_EQ(policy->choose(engines, {})->worker, 1U);
  engines[1].compensation_tokens = 100;
  EXPECT_EQ(policy->choose(engines, {})->worker, 0U);
}

TEST(Baselines, LeastLoadDividesByThroughput) {
  std::vector<EngineView> engines = {fresh(0, 0, 0.5), fresh(0, 0, 1.0)};
  engines[0].waiting = 4;
  engines[0].running = 6;
  engines[0].throughput = 5;
  engines[1].running = 1;
  engines[1].throughput = 1;
  const auto decision = engine_policy("least-load")->choose(engines, {});
  EXPECT_FLOAT_EQ(decision->scores[0], 3);
  EXPECT_NEAR(decision->scores[1], 1000, 1);  // full, but not infinitely far away
}

TEST(Baselines, ReplayFollowsItsAssignment) {
  std::vector<EngineView> engines(3);
  engines[0].in_flight = 1;
  const auto policy = engine_policy("replay");
  EXPECT_EQ(policy->choose(engines, {.assigned = 0})->worker, 0U);
  EXPECT_EQ(policy->choose(engines, {.assigned = 0})->reason, Reason::kAssigned);
  EXPECT_NE(policy->choose(engines, {})->worker, 0U);  // nobody assigned: request count
  engines[2].available = false;
  EXPECT_EQ(policy->choose(engines, {.assigned = 2})->worker, 1U);
  EXPECT_EQ(policy->choose(engines, {.assigned = 7})->worker, 1U);
}

TEST(Baselines, WithoutTracesTheyGoByTheLedger) {
  for (const std::string_view name : engine_policy_names()) {
    if (name == "pressure" || name == "round-robin") continue;
    std::vector<EngineView> engines(2);
    engines[0].in_flight = engines[0].unseen = 2;
    engines[0].compensation_tokens = 100;
    EXPECT_EQ(engine_policy(std::string(name))->choose(engines, {})->worker, 1U) << name;
  }
}

TEST(Baselines, RoundRobinGoesRound) {
  std::vector<EngineView> engines(3);
  engines[1].available = false;
  const auto policy = engine_policy("round-robin");
  for (const size_t want : {0U, 2U, 0U, 2U}) EXPECT_EQ(policy->choose(engines, {})->worker, want);
}

}  // namespace
}  // namespace kindred::policy
