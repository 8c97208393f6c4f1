#include "sim/trace_reader.h"

#include <gtest/gtest.h>

#include <cmath>

#include "base/config.h"

namespace kindred::sim {
namespace {

const std::string kTraces = KINDRED_SOURCE_DIR "/tests/data/traces/";

Trace read(const std::string& name) {
  Result<Trace> trace = read_trace(kTraces + name);
  EXPECT_TRUE(trace.ok()) << trace.error().message;
  return *std::move(trace);
}

Error refused(const std::string& text) {
  const Result<Trace> trace = parse_trace(text, "trace");
  EXPECT_FALSE(trace.ok());
  return trace.ok() ? Error{} : trace.error();
}

void expect_refused(const std::string& text, const std::string& field, const std::string& line) {
  const Error error = refused(text);
  EXPECT_EQ(error.code, ErrorCode::kInvalid);
  EXPECT_EQ(error.field, field) << error.message;
  EXPECT_NE(error.message.find(line), std::string::npos) << error.message;
}

TEST(TraceReader, Mooncake) {
  const Trace trace = read("mooncake.jsonl");
  ASSERT_EQ(trace.requests.size(), 8);
  EXPECT_EQ(trace.requests[1].prompt_tokens, 7322);
  EXPECT_EQ(trace.requests[1].output_tokens, 490);
  EXPECT_EQ(trace.requests[1].blocks.size(), 15);
  EXPECT_EQ(trace.requests[1].blocks[0], trace.requests[0].blocks[0]);
  EXPECT_NE(trace.requests[1].blocks[1], trace.requests[0].blocks[1]);
  EXPECT_EQ(trace.requests[1].domain, -1);
  EXPECT_EQ(trace.block_tokens, 512);
}

TEST(TraceReader, KindredsLinesAreMooncakesAndMore) {
  const Result<Trace> trace = parse_trace(
      R"({"timestamp": 500, "input_length": 10, "output_length": 2, "hash_ids": [7], "domain": "math", "expert_profile": 3}
{"timestamp": 1250.5, "input_length": 10, "output_length": 2, "domain": "code"}

{"timestamp": 1250.5, "input_length": 10, "output_length": 0}
{"timestamp": 1251, "input_length": 10, "output_length": 2, "domain": "math", "unknown": 1}
)",
      "trace");
  ASSERT_TRUE(trace.ok()) << trace.error().message;
  ASSERT_EQ(trace->requests.size(), 3);
  EXPECT_EQ(trace->domains, (std::vector<std::string>{"math", "code"}));
  EXPECT_EQ(trace->requests[0].expert_profile, 3);
  EXPECT_EQ(trace->requests[1].domain, 1);
  EXPECT_DOUBLE_EQ(trace->requests[1].arrival_s, 0.7505);
  EXPECT_EQ(trace->requests[2].domain, 0);
  EXPECT_EQ(trace->skipped, 1);
  const Result<Trace> again = parse_trace(trace_to_jsonl(*trace), "again");
  ASSERT_TRUE(again.ok()) << again.error().message;
  ASSERT_EQ(again->requests.size(), 3);
  EXPECT_EQ(again->requests[0].blocks, trace->requests[0].blocks);
  EXPECT_DOUBLE_EQ(again->requests[2].arrival_s, trace->requests[2].arrival_s);
  EXPECT_EQ(again->domains, trace->domains);
}

TEST(TraceReader, Azure) {
  const Trace trace = read("azure_2023.csv");
  ASSERT_EQ(trace.requests.size(), 8);
  EXPECT_DOUBLE_EQ(trace.requests[0].arrival_s, 0);
  EXPECT_NEAR(trace.requests[1].arrival_s, 4.3145790, 1e-6);
  EXPECT_EQ(trace.requests[1].prompt_tokens, 396);
  EXPECT_EQ(trace.requests[1].output_tokens, 109);
}

// That of 2024 has offsets, and no fraction where it would be zero.
TEST(TraceReader, AzureDatesOverMidnightAndLeapDay) {
  const Result<Trace> trace = parse_trace(
      "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
      "2024-02-28 23:59:59.5+00:00,1,2\r\n"
      "2024-02-29 00:00:00+00:00,1,2\r\n"
      "2024-03-01T00:00:00Z,1,2\r\n",
      "trace");
  ASSERT_TRUE(trace.ok()) << trace.error().message;
  EXPECT_DOUBLE_EQ(trace->requests[1].arrival_s, 0.5);
  EXPECT_DOUBLE_EQ(trace->requests[2].arrival_s, 86400.5);
}

TEST(TraceReader, BurstGpt) {
  const Result<Trace> trace = parse_trace(
      "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
      "5,ChatGPT,472,18,490,Conversation log\n"
      "45,ChatGPT,1087,0,1087,Conversation log\n"
      "118.5,GPT-4,417,276,693,API log\n",
      "trace");
  ASSERT_TRUE(trace.ok()) << trace.error().message;
  ASSERT_EQ(trace->requests.size(), 2);
  EXPECT_DOUBLE_EQ(trace->requests[1].arrival_s, 113.5);
  EXPECT_EQ(trace->requests[1].prompt_tokens, 417);
  EXPECT_EQ(trace->skipped, 1);
}

TEST(TraceReader, NamesLineAndField) {
  const std::string good = R"({"timestamp": 9, "input_length": 1, "output_length": 1})"
                           "\n";
  expect_refused(good + R"({"timestamp": 8, "input_length": 1, "output_length": 1})", "timestamp", "line 2");
  expect_refused(good + R"({"input_length": 1, "output_length": 1})", "timestamp", "line 2");
  expect_refused(good + R"({"timestamp": -1, "input_length": 1, "output_length": 1})", "timestamp", "line 2");
  expect_refused(good + R"({"timestamp": 9, "input_length": -1, "output_length": 1})", "input_length", "line 2");
  expect_refused(good + R"({"timestamp": 9, "input_length": 0, "output_length": 1})", "input_length", "line 2");
  expect_refused(good + R"({"timestamp": 9, "input_length": 1})", "output_length", "line 2");
  expect_refused(good + R"({"timestamp": 9, "input_length": 1, "output_length": 1e12})", "output_length", "line 2");
  expect_refused(R"({"timestamp": 9, "input_length": 512, "output_length": 1, "hash_ids": [1, 2]})", "hash_ids",
                 "line 1");
  expect_refused(R"({"timestamp": 9, "input_length": 1, "output_length": 1, "hash_ids": ["a"]})", "hash_ids", "line 1");
  expect_refused(R"({"timestamp": 9, "input_length": 1, "output_length": 1, "expert_profile": -1})", "expert_profile",
                 "line 1");
  expect_refused(R"({"timestamp": 9, "input_length": 1, "output_length": 1, "domain": 4})", "domain", "line 1");
  EXPECT_NE(refused(good + "{oops").message.find("line 2"), std::string::npos);

  const std::string azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n";
  expect_refused(azure + "2023-11-16 18:15:46.67,374,44\n", "TIMESTAMP", "line 3");
  expect_refused(azure + "16.11.2023,374,44\n", "TIMESTAMP", "line 3");
  expect_refused(azure + "2023-13-16 18:15:46,374,44\n", "TIMESTAMP", "line 3");
  expect_refused(azure + "2023-11-16 18:15:47,,44\n", "ContextTokens", "line 3");
  expect_refused(azure + "2023-11-16 18:15:47,4,-4\n", "GeneratedTokens", "line 3");
  expect_refused("TIMESTAMP,ContextTokens\n", "GeneratedTokens", "line 1");
  EXPECT_NE(refused(azure + "2023-11-16 18:15:47,4\n").message.find("line 3"), std::string::npos);
  expect_refused("Timestamp,Request tokens,Response tokens\n-5,4,4\n", "Timestamp", "line 2");

  EXPECT_NE(refused("a,b\n1,2\n").message.find("Mooncake"), std::string::npos);
  EXPECT_EQ(refused("").code, ErrorCode::kInvalid);
  EXPECT_EQ(read_trace("/nowhere/trace.csv").error().code, ErrorCode::kNotFound);
}

struct Gaps {
  double mean = 0, cv2 = 0;
};
Gaps gaps(double burstiness) {
  const Result<Trace> trace = draw_arrivals({.requests = 40'000, .rate_per_s = 20, .burstiness = burstiness});
  EXPECT_TRUE(trace.ok());
  double before = 0, sum = 0, squares = 0;
  for (const TraceRequest& request : trace->requests) {
    const double gap = request.arrival_s - before;
    EXPECT_GE(gap, 0);
    sum += gap;
    squares += gap * gap;
    before = request.arrival_s;
  }
  const auto n = static_cast<double>(trace->requests.size());
  return {sum / n, squares / n / (sum / n * sum / n) - 1};
}

TEST(Arrivals, HaveTheirRateAndBurstiness) {
  for (const double burstiness : {0.3, 1.0, 4.0}) {
    const Gaps of = gaps(burstiness);
    // Four standard errors of the mean; the variance's are wider for bursty arrivals.
    EXPECT_NEAR(of.mean, 0.05, 4 * 0.05 / std::sqrt(burstiness * 40'000)) << burstiness;
    EXPECT_NEAR(of.cv2, 1 / burstiness, 0.1 / burstiness) << burstiness;
  }
}

TEST(Arrivals, LengthsAreDrawnOrTakenFromATrace) {
  const ArrivalOptions options{.requests = 2000,
                               .rate_per_s = 5,
                               .least_prompt_tokens = 10,
                               .most_prompt_tokens = 12,
                               .least_output_tokens = 7,
                               .most_output_tokens = 7};
  const Result<Trace> drawn = draw_arrivals(options);
  ASSERT_TRUE(drawn.ok());
  std::vector<int> seen(20, 0);
  for (const TraceRequest& request : drawn->requests) {
    ++seen.at(request.prompt_tokens);
    EXPECT_EQ(request.output_tokens, 7);
  }
  EXPECT_EQ(seen[10] + seen[11] + seen[12], 2000);
  for (const int n : {10, 11, 12}) EXPECT_NEAR(seen[static_cast<size_t>(n)], 667, 90);

  const Trace lengths = read("mooncake.jsonl");
  const Result<Trace> resampled = draw_arrivals(options, lengths);
  ASSERT_TRUE(resampled.ok());
  EXPECT_EQ(resampled->requests.size(), 2000);
  EXPECT_DOUBLE_EQ(resampled->requests[5].arrival_s, drawn->requests[5].arrival_s);
  for (const TraceRequest& request : resampled->requests) {
    EXPECT_EQ(request.blocks.size(), (request.prompt_tokens + 511) / 512);
  }
  EXPECT_EQ(draw_arrivals(options, Trace{}).error().field, "lengths");
}

TEST(Arrivals, NameOptionsOutOfRange) {
  EXPECT_EQ(draw_arrivals({.requests = 0}).error().field, "requests");
  EXPECT_EQ(draw_arrivals({.rate_per_s = 0}).error().field, "rate_per_s");
  EXPECT_EQ(draw_arrivals({.burstiness = 0}).error().field, "burstiness");
  EXPECT_EQ(draw_arrivals({.least_prompt_tokens = 9, .most_prompt_tokens = 8}).error().field, "prompt_tokens");
  EXPECT_EQ(draw_arrivals({.least_output_tokens = 0}).error().field, "output_tokens");
}

}  // namespace
}  // namespace kindred::sim
