// Workers with several engines, chosen by a router that reads their traces.

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "sim/cluster_testing.h"

namespace kindred::sim {
namespace {

using testing::TestModel;

class ClusterEngines : public ::testing::Test {
 protected:
  static LinearCost engine_cost() {
    LinearCost out;
    out.host_s = 0.002;
    out.prefill_token_s = 2e-5;
    out.expert_s = 1e-4;
    out.kv_token_s = 1e-6;
    return out;
  }
  // `workers` of `engines` each, apart.
  static ClusterOptions apart(uint32_t workers, uint32_t engines, const std::string& policy = "pressure") {
    ClusterOptions options;
    options.groups = {testing::group(Role::kBoth, workers, engine_cost())};
    options.groups[0].engines = engines;
    options.groups[0].lockstep = false;
    options.groups[0].engine.kv.cache = false;
    options.router.engine = policy::EnginePolicyOptions{.name = policy};
    return options;
  }
  // Prompts of very different lengths.
  std::vector<SimRequest> uneven_load(double rate, size_t count, uint64_t seed) const {
    std::vector<SimRequest> out = testing::poisson_load(model_, rate, count, 100, 20, seed);
    Rng rng(seed);
    for (SimRequest& request : out) {
      if (rng.below(4) == 0) request.prompt_tokens = 4000;
    }
    return out;
  }
  static void expect_idle(const SimResult& run) {
    EXPECT_EQ(run.ledger_left, 0);
    EXPECT_EQ(run.engine_ledgers_left, 0);
    for (const WorkerReport& worker : run.workers) EXPECT_EQ(worker.kv_left_blocks, 0U) << worker.name;
  }
  static uint64_t without_trace(const SimResult& run) {
    return run.fallbacks.at(static_cast<size_t>(policy::FallbackReason::kNoTrace));
  }
  // Of the requests that arrived in [from_s, until_s) and were not sent directly, the share on an engine.
  static double share_on(const SimResult& run, std::span<const SimRequest> requests, uint32_t engine, double from_s,
                         double until_s) {
    double there = 0, all = 0;
    for (size_t i = 0; i < requests.size(); ++i) {
      if (requests[i].direct || requests[i].arrival_s < from_s || requests[i].arrival_s >= until_s) continue;
      ++all;
      there += run.requests[i].engine == engine ? 1 : 0;
    }
    return all > 0 ? there / all : 0;
  }

  TestModel model_;
};

TEST_F(ClusterEngines, ApartTheyDoNotWaitForEachOther) {
  struct ByContext final : StepCost {
    double step_s(const StepShape& shape) const override {
      return 1e-3 + 1e-6 * shape.decode_context_tokens + 1e-5 * shape.prefill_tokens;
    }
    double kv_transfer_s(double) const override { return 0; }
  };
  ClusterOptions options = apart(1, 2, "round-robin");
  options.groups[0].cost = std::make_shared<ByContext>();
  const std::vector<SimRequest> requests = {model_.request(0, 1000, 3), model_.request(0, 10, 3)};
  const Result<SimResult> run = run_cluster(options, requests);
  ASSERT_TRUE(run) << run.error().message;
  EXPECT_NE(run->requests[0].engine, run->requests[1].engine);
  EXPECT_NEAR(run->requests[1].ttft_s(), 1e-3 + 10e-5, 1e-8);
  EXPECT_NEAR(run->requests[1].tpot_s(), 1e-3 + 1e-6 * (11 + 12) / 2, 2e-8);
  EXPECT_NEAR(run->requests[0].ttft_s(), 1e-3 + 1000e-5, 1e-8);
}

TEST_F(ClusterEngines, RanksTieEnginesTogether) {
  ClusterOptions options = apart(1, 2);
  options.groups[0].ranks = 2;
  const std::vector<SimRequest> requests = {model_.request(0, 10, 3)};
  const Result<SimResult> run = run_cluster(options, requests);
  ASSERT_FALSE(run);
  EXPECT_EQ(run.error().field, "lockstep");
}

TEST_F(ClusterEngines, CompensationIsConservedWhateverHappens) {
  for (const std::string_view policy : policy::engine_policy_names()) {
    for (uint64_t seed = 1; seed <= 3; ++seed) {
      ClusterOptions options = apart(3, 2, std::string(policy));
      options.routers = 2;
      options.router.decode.seed = seed;
      options.script = {{.at_s = 1, .kind = ScriptKind::kFail, .worker = 1},
                        {.at_s = 3, .kind = ScriptKind::kJoin, .worker = 1},
                        {.at_s = 4, .kind = ScriptKind::kLeave, .worker = 2}};
      options.trace_losses = {{.from_s = 0.5, .until_s = 9, .worker = 0, .engine = 1}};
      std::vector<SimRequest> requests = uneven_load(60, 400, seed);
      for (size_t i = 0; i < requests.size(); i += 9) requests[i].direct = EnginePlace{.worker = 0, .engine = 1};
      const Result<SimResult> run = run_cluster(options, requests);
      ASSERT_TRUE(run) << run.error().message;
      expect_idle(*run);
      EXPECT_GT(run->traces, 100U);
    }
  }
}

TEST_F(ClusterEngines, PrefillWorkersHaveEnginesToo) {
  ClusterOptions options = testing::pd(2, 2, engine_cost());
  options.groups[0].engines = 2;
  options.groups[0].lockstep = false;
  options.router.engine = policy::EnginePolicyOptions{};
  const std::vector<SimRequest> requests = uneven_load(60, 300, 4);
  const Result<SimResult> run = run_cluster(options, requests);
  ASSERT_TRUE(run) << run.error().message;
  expect_idle(*run);
  std::array<size_t, 4> on{};
  for (const RequestRecord& record : run->requests) {
    EXPECT_EQ(record.ended, Ended::kOk);
    ++on.at(record.prefill_worker * 2 + record.engine);
  }
  for (const size_t count : on) EXPECT_GT(count, 40U);
}

TEST_F(ClusterEngines, EqualSeedsGiveEqualRuns) {
  const auto places = [&](uint64_t seed, const std::string& tie_break) {
    ClusterOptions options = apart(2, 2);
    options.router.engine->tie_break = tie_break;
    options.router.engine->seed = seed;
    std::string out;
    const Result<SimResult> run = run_cluster(options, uneven_load(80, 300, 2));
    EXPECT_TRUE(run);
    for (const RequestRecord& record : run->requests) {
      out += std::to_string(record.decode_worker) + ":" + std::to_string(record.engine) + "@" +
             std::to_string(record.last_ns) + ";";
    }
    return out;
  };
  EXPECT_EQ(places(1, "rotate"), places(1, "rotate"));
  EXPECT_EQ(places(7, "random"), places(7, "random"));
}

// Who does not ask the router shows in its engine's traces, and there alone.
TEST_F(ClusterEngines, PicksShiftWithinAHeartbeatOfABypassingClient) {
  std::vector<SimRequest> requests = testing::poisson_load(model_, 50, 500, 100, 4, 6);
  for (int i = 0; i < 60; ++i) {
    SimRequest heavy = model_.request(4 + 0.1 * i, 8000, 2);
    heavy.direct = EnginePlace{.worker = 0, .engine = 0};
    requests.push_back(std::move(heavy));
  }
  std::ranges::stable_sort(requests, {}, &SimRequest::arrival_s);
  const auto shares = [&](const std::string& policy) {
    const Result<SimResult> run = run_cluster(apart(1, 2, policy), requests);
    EXPECT_TRUE(run);
    return std::pair(share_on(*run, requests, 0, 0, 4), share_on(*run, requests, 0, 5, 10));
  };
  const auto [before, after] = shares("pressure");
  EXPECT_NEAR(before, 0.5, 0.1);
  EXPECT_LT(after, 0.02);
  // The ledger alone does not see it coming: what is stuck there shows much later.
  EXPECT_GT(shares("round-robin").second, 0.4);
}

TEST_F(ClusterEngines, LostTracesOfOneEngineBlindTheOthersBriefly) {
  ClusterOptions options = apart(1, 3);
  options.trace_losses = {{.from_s = 2, .until_s = 1e6, .worker = 0, .engine = 2}};
  const std::vector<SimRequest> requests = testing::poisson_load(model_, 50, 1500, 100, 4, 8);
  const Result<SimResult> run = run_cluster(options, requests);
  ASSERT_TRUE(run) << run.error().message;
  // Late from 5 s on, for 2 s; before and after, pressure decides.
  EXPECT_GT(without_trace(*run), 50U);
  EXPECT_LT(without_trace(*run), 160U);
  EXPECT_GT(share_on(*run, requests, 2, 10, 30), 0.1);  // it is not given up either
  expect_idle(*run);
}

TEST_F(ClusterEngines, ADeadEngineIsNotChosenAndOthersGoOnByPressure) {
  ClusterOptions options = apart(3, 1);
  options.script = {{.at_s = 4, .kind = ScriptKind::kFail, .worker = 1}};
  const std::vector<SimRequest> requests = testing::poisson_load(model_, 50, 1000, 100, 4, 9);
  const Result<SimResult> run = run_cluster(options, requests);
  ASSERT_TRUE(run) << run.error().message;
  for (const RequestRecord& record : run->requests) {
    if (record.arrival_ns > 4'000'000'000) {
      EXPECT_NE(record.decode_worker, 1U);
    }
  }
  EXPECT_LT(without_trace(*run), 20U);
  expect_idle(*run);
}

TEST_F(ClusterEngines, TracesComeOnChangeAndAsHeartbeats) {
  ClusterOptions options = apart(1, 2, "round-robin");
  // One engine has a request at 0 s and at 20 s, the other one at 10 s.
  const std::vector<SimRequest> requests = {model_.request(0, 10, 2), model_.request(10, 10, 2),
                                            model_.request(20, 10, 2)};
  const Result<SimResult> run = run_cluster(options, requests);
  ASSERT_TRUE(run) << run.error().message;
  EXPECT_GE(run->traces, 2U * 20);
  EXPECT_LE(run->traces, 2U * 21 + 12);
  const Result<SimResult> busy = run_cluster(options, testing::poisson_load(model_, 200, 2000, 100, 20, 1));
  ASSERT_TRUE(busy);
  EXPECT_LE(static_cast<double>(busy->traces), 2 * busy->end_s / 0.020 + 2);
  EXPECT_GT(static_cast<double>(busy->traces), 1.5 * busy->end_s / 0.020);
}

// A long prompt under a flood of short ones, which alone are more than the engines can do.
TEST_F(ClusterEngines, AgingEndsStarvationInAWholeCluster) {
  LinearCost slow;
  slow.host_s = 0.01;
  std::vector<SimRequest> requests;
  for (int i = 0; i < 2400; ++i) requests.push_back(model_.request(i / 300.0, 60, 1));
  requests.insert(requests.begin() + 300, model_.request(1, 600, 1));  // by now there is a queue
  const auto long_ttft_s = [&](int64_t age_ns) {
    ClusterOptions options = apart(1, 2);
    options.groups[0].cost = std::make_shared<LinearCost>(slow);
    options.groups[0].engine.token_budget = 64;
    options.groups[0].engine.max_running = 4;
    options.groups[0].engine.queue = {.policy = policy::QueuePolicy::kSjfAging, .age_ns = age_ns};
    const Result<SimResult> run = run_cluster(options, requests);
    EXPECT_TRUE(run);
    return run->requests[300].ttft_s();
  };
  EXPECT_GT(long_ttft_s(int64_t{1} << 60), 7);  // shortest first, whatever happens: after the flood
  EXPECT_LT(long_ttft_s(500'000'000), 1.5);
}

TEST_F(ClusterEngines, WrongInputIsNamed) {
  ClusterOptions options = apart(1, 2);
  std::vector<SimRequest> requests = {model_.request(0, 10, 3)};
  requests[0].direct = EnginePlace{.worker = 0, .engine = 2};
  EXPECT_EQ(run_cluster(options, requests).error().field, "direct");
  requests[0].direct.reset();
  options.trace_losses = {{.from_s = 2, .until_s = 1, .worker = 0, .engine = 0}};
  EXPECT_EQ(run_cluster(options, requests).error().field, "trace_losses");
  options.trace_losses.clear();
  options.trace_ms = 0;
  EXPECT_EQ(run_cluster(options, requests).error().field, "trace_ms");
  options.trace_ms = 20;
  options.groups[0].engines = 65;
  EXPECT_EQ(run_cluster(options, requests).error().field, "engines");
}

}  // namespace
}  // namespace kindred::sim
