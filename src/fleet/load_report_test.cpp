#include "fleet/load_report.h"

#include <gtest/gtest.h>

#include <limits>

#include "fleet/fleet.h"

namespace kindred::fleet {
namespace {

using namespace std::chrono_literals;

TEST(LoadReport, SumsTheEnginesOfAVllmServer) {
  const LoadReport got = parse_load_metrics(Dialect::kVllm, R"(# HELP vllm:num_requests_running Number of requests
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a}\"b"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_running_total{engine="0"} 99
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5 1764000000000
)");
  EXPECT_EQ(got.running, 7);
  EXPECT_EQ(got.waiting, 1);
  EXPECT_EQ(got.kv_usage, 0.5);
  EXPECT_EQ(got.requests(), 8);
  EXPECT_EQ(parse_load_metrics(Dialect::kVllm, "vllm:gpu_cache_usage_perc{} 0.125").kv_usage, 0.125);
}

TEST(LoadReport, KnowsTheOthersNames) {
  const LoadReport sglang = parse_load_metrics(
      Dialect::kSglang, "sglang:num_running_reqs{a=\"b\"} 2\nsglang:num_queue_reqs{} 5\nsglang:token_usage{} 0.9\n");
  EXPECT_EQ(sglang.requests(), 7);
  EXPECT_EQ(sglang.kv_usage, 0.9);
  const LoadReport llama =
      parse_load_metrics(Dialect::kLlamaServer, "llamacpp:requests_processing 1\r\nllamacpp:requests_deferred 4\r\n");
  EXPECT_EQ(llama.requests(), 5);
  EXPECT_FALSE(llama.kv_usage.has_value());
  EXPECT_EQ(
      parse_load_metrics(Dialect::kKindred, "vllm:num_requests_running{} 1\nvllm:num_requests_waiting{} 1").requests(),
      2);
}

TEST(LoadReport, WhatIsMissingIsUnknownNotZero) {
  for (const char* text : {"", "vllm:num_requests_running 3", "vllm:num_requests_running\n",
                           "vllm:num_requests_running{ 3\nvllm:num_requests_waiting 1", "\x00\xff{{{",
                           "vllm:num_requests_running nan\nvllm:num_requests_waiting 1",
                           "vllm:num_requests_running -1\nvllm:num_requests_waiting 1",
                           "vllm:num_requests_running 1e999\nvllm:num_requests_waiting 1"}) {
    EXPECT_FALSE(parse_load_metrics(Dialect::kVllm, text).requests().has_value()) << text;
  }
  EXPECT_FALSE(parse_load_metrics(Dialect::kOpenAi, "vllm:num_requests_running 3").requests().has_value());
}

TEST(LoadReport, ReadsSglangsLoads) {
  const LoadReport got = parse_sglang_loads(
      R"({"timestamp":"t","version":"0.5","dp_rank_count":2,"loads":[
        {"dp_rank":0,"num_running_reqs":3,"num_waiting_reqs":2,"num_used_tokens":10,"token_usage":0.2},
        {"dp_rank":1,"num_running_reqs":7,"num_waiting_reqs":5,"token_usage":0.95}],"aggregate":{}})");
  EXPECT_EQ(got.running, 10);
  EXPECT_EQ(got.waiting, 7);
  EXPECT_EQ(got.kv_usage, 0.95);
  for (const char* text :
       {"", "{}", R"({"loads":7})", R"({"loads":[]})", R"({"loads":[7]})", R"({"loads":[{"num_running_reqs":1}]})",
        R"({"loads":[{"num_running_reqs":1,"num_waiting_reqs":-1}]})",
        R"({"loads":[{"num_running_reqs":1,"num_waiting_reqs":1},{}]})"}) {
    EXPECT_FALSE(parse_sglang_loads(text).requests().has_value()) << text;
  }
}

TEST(LoadReport, TellsTheEnginesOfMetricsApart) {
  const LoadReport got = parse_load_metrics(Dialect::kVllm, R"(vllm:num_requests_running{engine="1",m="a"} 4
vllm:num_requests_running{m="engine=\"7\"",engine="0"} 3
vllm:num_requests_waiting{engine="0"} 1
vllm:num_requests_waiting{engine="1"} 0
vllm:kv_cache_usage_perc{engine="1"} 0.5
)");
  ASSERT_EQ(got.engines.size(), 2U);
  EXPECT_EQ(got.engines[0], (EngineLoad{.rank = 0, .running = 3, .waiting = 1}));
  EXPECT_EQ(got.engines[1], (EngineLoad{.rank = 1, .running = 4, .waiting = 0, .kv_usage = 0.5}));
  const LoadReport sglang = parse_load_metrics(
      Dialect::kSglang, "sglang:num_running_reqs{dp_rank=\"0\"} 2\nsglang:num_queue_reqs{dp_rank=\"0\"} 5\n");
  EXPECT_EQ(sglang.engines.size(), 1U);
  // One that tells half, a hole, ranks that are none: no list, while the sums stay.
  for (const char* more : {"vllm:num_requests_running{engine=\"1\"} 1\n",
                           "vllm:num_requests_running{engine=\"2\"} 1\nvllm:num_requests_waiting{engine=\"2\"} 1\n"}) {
    const LoadReport partial =
        parse_load_metrics(Dialect::kVllm, std::string("vllm:num_requests_running{engine=\"0\"} 1\n"
                                                       "vllm:num_requests_waiting{engine=\"0\"} 1\n") +
                                               more);
    EXPECT_TRUE(partial.engines.empty()) << more;
    EXPECT_TRUE(partial.requests().has_value());
  }
  for (const char* rank : {"64", "-1", "x", "4294967296", ""}) {
    const std::string label = std::string("{engine=\"") + rank + "\"} 1\n";
    EXPECT_TRUE(
        parse_load_metrics(Dialect::kVllm, "vllm:num_requests_running" + label + "vllm:num_requests_waiting" + label)
            .engines.empty())
        << rank;
  }
}

TEST(LoadReport, ReadsTokensPerRank) {
  const LoadReport sglang = parse_sglang_loads(
      R"([{"dp_rank":1,"num_running_reqs":3,"num_waiting_reqs":2,"num_used_tokens":10,"num_total_tokens":70,
           "max_total_num_tokens":100,"token_usage":0.1},
          {"dp_rank":0,"num_running_reqs":1,"num_waiting_reqs":0,"num_used_tokens":5,"num_total_tokens":9,
           "num_waiting_uncached_tokens":3,"max_total_num_tokens":100,"token_usage":7}])");
  ASSERT_EQ(sglang.engines.size(), 2U);
  EXPECT_EQ(sglang.engines[0].waiting_prefill_tokens, 3);
  EXPECT_EQ(sglang.engines[0].kv_usage, 1);
  EXPECT_EQ(sglang.engines[1].waiting_prefill_tokens, 60);
  EXPECT_EQ(sglang.engines[1].remaining_prefill_tokens, 0);
  EXPECT_EQ(sglang.engines[1].kv_used_tokens, 10);
  EXPECT_EQ(sglang.engines[1].kv_tokens, 100);
  const LoadReport kindred = parse_sglang_loads(
      R"({"loads":[{"dp_rank":0,"num_running_reqs":3,"num_waiting_reqs":2,
                    "kindred":{"remaining_prefill_tokens":40,"waiting_prefill_tokens":500}}]})");
  ASSERT_EQ(kindred.engines.size(), 1U);
  EXPECT_EQ(kindred.engines[0].remaining_prefill_tokens, 40);
  EXPECT_EQ(kindred.engines[0].waiting_prefill_tokens, 500);
  // Ranks given twice or left out are no list of engines; who tells no tokens says so.
  EXPECT_TRUE(parse_sglang_loads(R"([{"dp_rank":1,"num_running_reqs":3,"num_waiting_reqs":2}])").engines.empty());
  const LoadReport counts = parse_sglang_loads(R"([{"num_running_reqs":3,"num_waiting_reqs":2}])");
  ASSERT_EQ(counts.engines.size(), 1U);
  EXPECT_FALSE(counts.engines[0].waiting_prefill_tokens.has_value());
}

class LoadAge : public ::testing::Test {
 protected:
  explicit LoadAge(LoadSource source = LoadSource::kPolled)
      : fleet_(clock_, {.load = source, .load_max_age_ms = 5'000ms}) {
    for (const char* url : {"http://a", "http://b"}) {
      Description described;
      described.models = {"m"};
      fleet_.report_up(fleet_.add({.url = url}), described);
    }
  }
  double load(WorkerId id) { return fleet_.snapshot({.role = Role::kBoth, .model = "m"}).views[id].load; }

  ManualClock clock_;
  Fleet fleet_;
};

TEST_F(LoadAge, PollsThatFailAgeOutAndUnknownIsNotZero) {
  const LoadGuard own = fleet_.take(0, 3);
  EXPECT_EQ(load(0), 3);  // nothing was polled yet: the ledger
  fleet_.report_load(0, {.running = 10, .waiting = 4, .kv_usage = 0.5});
  EXPECT_EQ(load(0), 14);
  clock_.advance(5s);
  EXPECT_EQ(load(0), 14);
  EXPECT_DOUBLE_EQ(fleet_.worker_status(0).load_age_s, 5);
  clock_.advance(1ms);
  EXPECT_EQ(load(0), 3);  // not 14, which is old; not 0, which it never said
  EXPECT_FALSE(fleet_.worker_status(0).load.has_value());
  fleet_.report_load(0, {.running = 1, .waiting = std::nullopt, .kv_usage = std::nullopt});
  EXPECT_EQ(load(0), 3);  // half an answer is none
  fleet_.report_load(0, {.running = 1, .waiting = 1, .kv_usage = std::nullopt});
  EXPECT_EQ(load(0), 2);
}

TEST_F(LoadAge, BetweenPollsWhatBeginsAndEndsHereCounts) {
  LoadGuard before = fleet_.take(0, 2);
  fleet_.report_load(0, {.running = 5, .waiting = 0, .kv_usage = std::nullopt});
  const LoadGuard later = fleet_.take(0, 4);
  EXPECT_EQ(load(0), 9);  // at dispatch, not at the next poll
  before.release();
  EXPECT_EQ(load(0), 7);
  fleet_.report_load(0, {.running = 0, .waiting = 0, .kv_usage = std::nullopt});  // it has not seen them yet
  EXPECT_EQ(load(0), 0);
}

class LoadTokens : public LoadAge {
 protected:
  LoadTokens() : LoadAge(LoadSource::kTokens) {}
};

TEST_F(LoadTokens, TheLedgerIsTakenAndGivenBackByTheGuard) {
  LoadGuard guard = fleet_.take(0, LegLoad{.requests = 2, .tokens = 700});
  const LoadGuard small = fleet_.take(1, LegLoad{.requests = 5, .tokens = 100});
  EXPECT_EQ(load(0), 700);
  EXPECT_EQ(load(1), 100);
  EXPECT_EQ(fleet_.worker_status(0).tokens_in_flight, 700);
  EXPECT_EQ(fleet_.unit_of({.requests = 2, .tokens = 700}), 700);
  LoadGuard moved = std::move(guard);
  moved.release();
  moved.release();
  EXPECT_EQ(load(0), 0);
}

}  // namespace
}  // namespace kindred::fleet
