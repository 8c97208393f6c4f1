#include "router/trace.h"

#include <gtest/gtest.h>

#include <set>

#include "router/request_notes.h"

namespace kindred::router {
namespace {

constexpr const char* kTrace = "0af7651916cd43dd8448eb211c80319c";
constexpr const char* kSpan = "b7ad6b7169203331";

net::Headers with_parent(const std::string& value) {
  net::Headers headers;
  headers.add("traceparent", value);
  return headers;
}

TEST(TraceParent, ParsesWhatTheRecommendationAllows) {
  const std::string ids = std::string(kTrace) + "-" + kSpan;
  const auto parent = parse_traceparent(with_parent("00-" + ids + "-01"));
  ASSERT_TRUE(parent);
  EXPECT_EQ(parent->trace_id, kTrace);
  EXPECT_EQ(parent->span_id, kSpan);
  EXPECT_TRUE(parent->sampled);
  EXPECT_FALSE(parse_traceparent(with_parent("00-" + ids + "-00"))->sampled);
  EXPECT_TRUE(parse_traceparent(with_parent("cc-" + ids + "-01-what the future brings")));
  for (const std::string& bad :
       {std::string(), "00-" + ids, "00-" + ids + "-1", "00-" + ids + "-01-x", "ff-" + ids + "-01", "00-" + ids + "-0g",
        "cc-" + ids + "-01x", "00-" + std::string(32, '0') + "-" + kSpan + "-01",
        "00-" + std::string(kTrace) + "-" + std::string(16, '0') + "-01",
        "00-0AF7651916CD43DD8448EB211C80319C-" + std::string(kSpan) + "-01", "00_" + ids + "-01"}) {
    EXPECT_FALSE(parse_traceparent(with_parent(bad))) << bad;
  }
  net::Headers twice = with_parent("00-" + ids + "-01");
  twice.add("Traceparent", "00-" + ids + "-01");
  EXPECT_FALSE(parse_traceparent(twice));
}

TEST(RequestTrace, PassesOnWhatItDoesNotRecord) {
  TraceIds ids(1);
  const std::string given = std::string("00-") + kTrace + "-" + kSpan + "-01";
  RequestTrace continued(with_parent(given), ids, std::nullopt);
  EXPECT_FALSE(continued.recorded());
  EXPECT_EQ(continued.traceparent(), given);
  RequestTrace begun({}, ids, std::nullopt);
  EXPECT_TRUE(begun.begun_here());
  EXPECT_TRUE(begun.traceparent().ends_with("-00"));
  EXPECT_TRUE(parse_traceparent(with_parent(begun.traceparent())));
  EXPECT_FALSE(begun.open("x", Span::Kind::kServer, {}));
}

TEST(RequestTrace, SpansNestAndWorkersContinueTheInnermost) {
  TraceIds ids(1);
  ManualClock clock;
  std::optional<RequestTrace> trace;
  trace.emplace(with_parent(std::string("00-") + kTrace + "-" + kSpan + "-01"), ids, 0.0);
  ASSERT_TRUE(trace->recorded());  // as its beginner decided
  const size_t request = *trace->open("request", Span::Kind::kServer, clock.now());
  std::string leg_id;
  {
    ScopedSpan leg(trace, clock, "leg", Span::Kind::kClient);
    leg.set("n", int64_t{7});
    clock.advance(std::chrono::seconds(2));
    const auto parent = parse_traceparent(with_parent(trace->traceparent()));
    ASSERT_TRUE(parent);
    EXPECT_EQ(parent->trace_id, kTrace);
    EXPECT_TRUE(parent->sampled);
    leg_id = parent->span_id;
  }
  clock.advance(std::chrono::seconds(1));
  const std::vector<Span> spans = trace->take(clock.now());
  ASSERT_EQ(spans.size(), 2U);
  EXPECT_EQ(spans[request].parent, kSpan);
  EXPECT_EQ(spans[1].parent, spans[request].id);
  EXPECT_EQ(spans[1].id, leg_id);
  EXPECT_EQ(seconds_between(spans[1].begin, spans[1].end), 2);
  EXPECT_EQ(seconds_between(spans[request].begin, spans[request].end), 3);
}

TEST(RequestTrace, SamplesTheShareAskedFor) {
  TraceIds ids(7);
  int recorded = 0;
  std::set<std::string> distinct;
  for (int i = 0; i < 2'000; ++i) {
    const RequestTrace trace({}, ids, 0.25);
    recorded += trace.recorded() ? 1 : 0;
    distinct.insert(trace.trace_id());
  }
  EXPECT_NEAR(recorded, 500, 100);
  EXPECT_EQ(distinct.size(), 2'000U);
  EXPECT_TRUE(RequestTrace({}, ids, 1.0).recorded());
  EXPECT_FALSE(RequestTrace({}, ids, 0.0).recorded());
}

TEST(RequestTrace, IsBounded) {
  TraceIds ids(1);
  RequestTrace trace({}, ids, 1.0);
  for (size_t i = 0; i < RequestTrace::kMostSpans; ++i) trace.close(*trace.open("x", Span::Kind::kClient, {}), {});
  EXPECT_FALSE(trace.open("x", Span::Kind::kClient, {}));
}

TEST(Usage, IsReadFromTheEndAndNotFromContent) {
  const TokenUsage chat = usage_in(R"({"choices":[{"text":"\"usage\":{\"prompt_tokens\":1}"}],)"
                                   R"("usage":{"prompt_tokens":12,"total_tokens":15,"completion_tokens": 3}})");
  EXPECT_EQ(chat.prompt_tokens, 12U);
  EXPECT_EQ(chat.output_tokens, 3U);
  const TokenUsage stream = usage_in(
      "data: {\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":6}}\n\n"
      "data: {\"usage\":null}\n\ndata: [DONE]\n\n");
  EXPECT_EQ(stream.prompt_tokens, 5U);
  EXPECT_EQ(usage_in(R"({"usage" : { "input_tokens":1,"output_tokens":2}})").output_tokens, 2U);
  for (const char* text : {"", "\"usage\"", "\"usage\":", "\"usage\":{", "\"usage\":{\"prompt_tokens\":}",
                           "\"usage\":{\"prompt_tokens\":-1}", "\"usage\":{\"prompt_tokens\":99999999999999999999}"}) {
    EXPECT_FALSE(usage_in(text).prompt_tokens) << text;
  }
}

TEST(StreamTail, KeepsTheEndOfPiecesOfAnySize) {
  for (const size_t piece : {1U, 7U, 100U, 1023U, 1024U, 5000U}) {
    std::string all;
    StreamTail tail;
    for (size_t i = 0; all.size() < 20'000; ++i) {
      const std::string bytes(piece, static_cast<char>('a' + i % 26));
      all += bytes;
      tail.feed(bytes);
      ASSERT_LE(tail.bytes().size(), 2 * StreamTail::kKeptBytes);
      ASSERT_TRUE(all.ends_with(tail.bytes()));
      ASSERT_GE(tail.bytes().size(), std::min(all.size(), StreamTail::kKeptBytes));
    }
  }
}

}  // namespace
}  // namespace kindred::router
