// Engines of workers in a fleet: traces, their age and order, and what policies read of them.

#include <gtest/gtest.h>

#include <vector>

#include "fleet/choose.h"
#include "fleet/fleet.h"

namespace kindred::fleet {
namespace {

using policy::TraceState;
using std::chrono::milliseconds;

class Engines : public ::testing::Test {
 protected:
  WorkerId add(uint32_t engines, Role role = Role::kBoth, Dialect dialect = Dialect::kKindred) {
    const WorkerId id = fleet_.add({.url = "http://w" + std::to_string(fleet_.size()), .role = role});
    Description said;
    said.dialect = dialect;
    said.models = {"m"};
    said.role = role;
    said.fingerprint = "f";
    said.engines = engines;
    fleet_.report_up(id, said);
    return id;
  }
  EngineTrace trace(uint32_t rank, uint64_t sequence, uint64_t remaining = 0) const {
    EngineTrace out;
    out.rank = rank;
    out.epoch = 9;
    out.sequence = sequence;
    out.remaining_prefill_tokens = remaining;
    out.running = remaining > 0 ? 1 : 0;
    return out;
  }
  policy::EngineView view(size_t at, Role role = Role::kBoth) {
    return fleet_.engine_snapshot({.role = role}).views.at(at);
  }

  ManualClock clock_;
  Fleet fleet_{clock_};
};

TEST_F(Engines, AllOfAllWorkersInOrder) {
  add(2);
  add(1);
  const EngineSnapshot snapshot = fleet_.engine_snapshot({.role = Role::kBoth, .model = "m"});
  EXPECT_EQ(snapshot.engines, (std::vector<EngineRef>{{0, 0}, {0, 1}, {1, 0}}));
  EXPECT_EQ(snapshot.available, 3U);
  EXPECT_EQ(fleet_.engine_snapshot({.role = Role::kBoth, .model = "other"}).available, 0U);
}

TEST_F(Engines, ATraceIsFreshThenLateThenUnknown) {
  add(1);
  EXPECT_EQ(view(0).trace, TraceState::kLate);  // it may be on its way
  clock_.advance(milliseconds(2'001));
  EXPECT_EQ(view(0).trace, TraceState::kUnknown);
  EXPECT_TRUE(fleet_.report_trace(0, trace(0, 1, 700)));
  EXPECT_EQ(view(0).trace, TraceState::kFresh);
  EXPECT_EQ(view(0).remaining_prefill_tokens, 700);
  clock_.advance(milliseconds(3'001));
  EXPECT_EQ(view(0).trace, TraceState::kLate);
  EXPECT_EQ(view(0).remaining_prefill_tokens, 0);  // unknown, and said so by its state
  clock_.advance(milliseconds(2'000));
  EXPECT_EQ(view(0).trace, TraceState::kUnknown);
}

TEST_F(Engines, OlderTracesChangeNothing) {
  add(1);
  EXPECT_TRUE(fleet_.report_trace(0, trace(0, 5, 500)));
  EXPECT_FALSE(fleet_.report_trace(0, trace(0, 4, 400)));
  EXPECT_FALSE(fleet_.report_trace(0, trace(0, 5, 400)));
  EXPECT_EQ(view(0).remaining_prefill_tokens, 500);
  EXPECT_TRUE(fleet_.report_trace(0, trace(0, 6, 600)));
}

TEST_F(Engines, ARestartedEngineIsHeardAtOnce) {
  add(1);
  fleet_.report_trace(0, trace(0, 500, 500));
  EngineTrace reborn = trace(0, 1, 10);
  reborn.epoch = 10;
  EXPECT_TRUE(fleet_.report_trace(0, reborn));
  EXPECT_EQ(view(0).remaining_prefill_tokens, 10);
}

TEST_F(Engines, ASequenceThatGoesBackForGoodIsARestart) {
  add(1);
  fleet_.report_trace(0, trace(0, 500, 500));
  EXPECT_FALSE(fleet_.report_trace(0, trace(0, 1, 10)));
  clock_.advance(milliseconds(1'600));  // nothing newer came
  EXPECT_TRUE(fleet_.report_trace(0, trace(0, 2, 10)));
  EXPECT_EQ(view(0).remaining_prefill_tokens, 10);
}

TEST_F(Engines, ClocksOfOthersDoNotMatter) {
  add(1);
  EngineTrace future = trace(0, 1, 500);
  future.time_s = 4e9;
  EXPECT_TRUE(fleet_.report_trace(0, future));
  EngineTrace past = trace(0, 2, 600);
  past.time_s = 0;
  EXPECT_TRUE(fleet_.report_trace(0, past));
  EXPECT_EQ(view(0).remaining_prefill_tokens, 600);
  clock_.advance(milliseconds(3'001));
  EXPECT_EQ(view(0).trace, TraceState::kLate);
}

TEST_F(Engines, TracesOfNoEngineAreIgnored) {
  const WorkerId worker = add(2);
  EXPECT_FALSE(fleet_.report_trace(worker, trace(2, 1)));
  fleet_.remove(worker);
  EXPECT_FALSE(fleet_.report_trace(worker, trace(0, 1)));
}

TEST_F(Engines, WhatWasSentCountsUntilATraceIncludesIt) {
  add(2);
  fleet_.report_trace(0, trace(0, 1));
  fleet_.report_trace(0, trace(1, 1));
  const LoadGuard guard = fleet_.take(EngineRef{0, 1}, {.requests = 1, .tokens = 900}, 800);
  ASSERT_NE(guard.dispatch(), 0U);
  EXPECT_EQ(view(0).compensation_tokens, 0);
  EXPECT_EQ(view(1).compensation_tokens, 800);
  EXPECT_EQ(view(1).unseen, 1);
  EXPECT_EQ(fleet_.worker_status(0).in_flight, 1);

  EngineTrace without = trace(1, 2, 50);
  fleet_.report_trace(0, without);
  EXPECT_EQ(view(1).compensation_tokens, 800);  // a newer trace alone proves nothing
  EngineTrace with = trace(1, 3, 750);
  with.received = {3, guard.dispatch()};
  fleet_.report_trace(0, with);
  EXPECT_EQ(view(1).compensation_tokens, 0);
  EXPECT_EQ(view(1).remaining_prefill_tokens, 750);
  EXPECT_EQ(view(1).in_flight, 1);
}

TEST_F(Engines, CompensationReturnsToZeroWithItsRequest) {
  add(1);
  fleet_.report_trace(0, trace(0, 1));
  LoadGuard guard = fleet_.take(EngineRef{0, 0}, {}, 800);
  LoadGuard moved = std::move(guard);
  EXPECT_EQ(view(0).compensation_tokens, 800);
  moved.release();
  EXPECT_EQ(view(0).compensation_tokens, 0);
  EXPECT_EQ(view(0).in_flight, 0);
}

TEST_F(Engines, ARankThatIsGoneCountsForItsWorker) {
  add(1);
  const LoadGuard guard = fleet_.take(EngineRef{0, 7}, {}, 800);
  EXPECT_EQ(guard.dispatch(), 0U);
  EXPECT_EQ(fleet_.worker_status(0).in_flight, 1);
}

TEST_F(Engines, ZeroForEverIsNotBelieved) {
  add(1);
  LoadGuard guard = fleet_.take(EngineRef{0, 0}, {}, 800);
  EngineTrace idle = trace(0, 1);
  idle.received = {guard.dispatch()};
  fleet_.report_trace(0, idle);
  EXPECT_EQ(view(0).compensation_tokens, 800);
  guard.answered();
  EXPECT_EQ(view(0).compensation_tokens, 0);  // now it may well be idle
}

TEST_F(Engines, PollsWithoutTokensAreFilledInFromTheLedger) {
  add(1);
  const std::vector<LoadGuard> guards = [&] {
    std::vector<LoadGuard> out;
    out.push_back(fleet_.take(EngineRef{0, 0}, {}, 300));
    out.push_back(fleet_.take(EngineRef{0, 0}, {}, 500));
    return out;
  }();
  clock_.advance(milliseconds(1));
  const EngineLoad load = {.rank = 0, .running = 1, .waiting = 5, .kv_usage = 0.5};
  fleet_.report_engines(0, {&load, 1}, clock_.now());
  // Three of those who wait are others'; prompts of ours are 400 tokens in the mean.
  EXPECT_EQ(view(0).waiting_prefill_tokens, 1200);
  EXPECT_EQ(view(0).compensation_tokens, 800);
  EXPECT_EQ(view(0).unseen, 0);
}

TEST_F(Engines, PollsFindEnginesAndDoNotReplacePushes) {
  add(1, Role::kBoth, Dialect::kVllm);
  const std::vector<EngineLoad> loads = {{.rank = 0, .running = 1}, {.rank = 1, .running = 2}};
  fleet_.report_engines(0, loads, clock_.now());
  EXPECT_EQ(fleet_.engine_snapshot({.role = Role::kBoth}).engines.size(), 2U);
  EngineTrace pushed = trace(1, 1, 70);
  pushed.running = 9;
  EXPECT_TRUE(fleet_.report_trace(0, pushed));
  fleet_.report_engines(0, loads, clock_.now());
  EXPECT_EQ(view(0).running, 1);
  EXPECT_EQ(view(1).running, 9);
  clock_.advance(milliseconds(3'001));
  fleet_.report_engines(0, loads, clock_.now());
  EXPECT_EQ(view(1).running, 2);
  const EngineLoad absurd = {.rank = 1'000'000};
  fleet_.report_engines(0, {&absurd, 1}, clock_.now());
  EXPECT_EQ(fleet_.engine_snapshot({.role = Role::kBoth}).engines.size(), 2U);
}

TEST_F(Engines, AfterARestartThereMayBeFewer) {
  const WorkerId kindred = add(4);
  LoadGuard guard = fleet_.take(EngineRef{kindred, 3}, {.requests = 1}, 500);
  Description said = fleet_.description(kindred);
  said.engines = 2;
  fleet_.report_up(kindred, said);
  EXPECT_EQ(fleet_.engine_snapshot({.role = Role::kBoth}).engines.size(), 2U);
  guard.release();
  const WorkerId other = fleet_.add({.url = "http://other", .role = Role::kDecode});
  const std::vector<EngineLoad> three = {{.rank = 0}, {.rank = 1}, {.rank = 2}};
  fleet_.report_engines(other, three, clock_.now());
  EXPECT_EQ(fleet_.worker_status(other).engines.size(), 3U);
  fleet_.report_engines(other, std::span(three).first(1), clock_.now());
  EXPECT_EQ(fleet_.worker_status(other).engines.size(), 1U);
}

TEST_F(Engines, EnginesOfOthersShowByTheirTraces) {
  const WorkerId other = fleet_.add({.url = "http://other", .role = Role::kBoth});
  EXPECT_TRUE(fleet_.report_trace(other, trace(2, 1)));
  EXPECT_EQ(fleet_.worker_status(other).engines.size(), 3U);
  EXPECT_FALSE(fleet_.report_trace(other, trace(kMostEngines, 1)));
}

TEST_F(Engines, TracesWinOverTheLedger) {
  // A client that bypasses this router loads engine 0: the ledger knows nothing of it, the next trace does.
  add(2);
  auto policy = *policy::make_engine_policy({});
  fleet_.report_trace(0, trace(0, 1));
  fleet_.report_trace(0, trace(1, 1));
  fleet_.report_trace(0, trace(0, 2, 20'000));
  std::vector<LoadGuard> guards;
  for (int i = 0; i < 10; ++i) {
    const auto choice = choose_engine(fleet_, *policy, Role::kBoth, {.model = "m", .prompt_tokens = 500});
    ASSERT_TRUE(choice);
    EXPECT_EQ(choice->engine.rank, 1U);
    guards.push_back(fleet_.take(choice->engine, {.tokens = 600}, static_cast<int64_t>(choice->prefill_tokens)));
  }
  EXPECT_EQ(view(1).compensation_tokens, 5'000);
}

TEST_F(Engines, OneDeadEngineBlindsForAMomentOnly) {
  add(1);
  add(1);
  add(1);
  auto policy = *policy::make_engine_policy({});
  const auto reason = [&] {
    return choose_engine(fleet_, *policy, Role::kBoth, {.model = "m", .prompt_tokens = 500})->decision.reason;
  };
  uint64_t sequence = 0;
  const auto others_report = [&] {
    ++sequence;
    fleet_.report_trace(0, trace(0, sequence, 0));
    fleet_.report_trace(1, trace(0, sequence, 9'000));
  };
  others_report();
  fleet_.report_trace(2, trace(0, 1));
  EXPECT_EQ(reason(), policy::Reason::kOrdered);  // engines 0 and 2 are alike
  clock_.advance(milliseconds(3'001));
  others_report();
  EXPECT_EQ(choose_engine(fleet_, *policy, Role::kBoth, {.model = "m"})->decision.fallback,
            policy::FallbackReason::kNoTrace);
  clock_.advance(milliseconds(2'000));
  others_report();
  EXPECT_EQ(reason(), policy::Reason::kPressure);  // engine 0; that without a trace counts as the mean
}

TEST_F(Engines, PressureAsTheLoadOfAWorker) {
  fleet_.set_options({.load = LoadSource::kPressure});
  add(2, Role::kDecode);
  add(1, Role::kDecode);
  const auto load = [&](size_t at) { return fleet_.snapshot({.role = Role::kDecode}).views.at(at).load; };
  const LoadGuard guard = fleet_.take(1, {.requests = 1, .tokens = 70});
  EXPECT_EQ(load(1), 70);  // nothing is known: the ledger
  EngineTrace full = trace(0, 1, 100);
  full.kv_usage = 0.5;
  full.kv_tokens = 1000;
  fleet_.report_trace(0, full);
  fleet_.report_trace(0, trace(1, 1));
  EXPECT_EQ(load(0), (100 + 2048) / 2.0);  // mean of its engines
  const LoadGuard sent = fleet_.take(EngineRef{0, 0}, {.tokens = 250}, 0);
  EXPECT_EQ(load(0), (100 + 2048 + 1024) / 2.0);  // a quarter of that engine's KV
}

TEST_F(Engines, ARestoredWorkerKnowsNothing) {
  const WorkerId worker = add(1);
  fleet_.report_trace(worker, trace(0, 9, 500));
  fleet_.remove(worker);
  fleet_.restore(worker);
  EXPECT_EQ(view(0).remaining_prefill_tokens, 0);
  EXPECT_NE(view(0).trace, TraceState::kFresh);
}

}  // namespace
}  // namespace kindred::fleet
