#include "fleet/engine_trace.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "base/bytes.h"
#include "base/json.h"

namespace kindred::fleet {
namespace {

EngineTrace sample_trace() {
  EngineTrace trace;
  trace.rank = 3;
  trace.epoch = 0xfedcba9876543210;
  trace.sequence = UINT64_MAX;
  trace.time_s = 1'796'000'000.25;
  trace.remaining_prefill_tokens = 4000;
  trace.waiting_prefill_tokens = 70'000;
  trace.running = 12;
  trace.waiting = 5;
  trace.kv_usage = 0.3;
  trace.kv_tokens = 16384;
  trace.expert_pressure = 17.5;
  trace.received = {1, UINT64_MAX, 0};
  return trace;
}

const Json& sample_json() {
  static const Json json = Json::from_msgpack(encode_trace(sample_trace()));
  return json;
}

Result<EngineTrace> parse(const Json& json) { return parse_trace(as_bytes(dump_msgpack(json))); }

// The field that is at fault, or "none".
std::string fault(const Json& json) {
  const auto parsed = parse(json);
  if (parsed) return "none";
  EXPECT_EQ(parsed.error().code, ErrorCode::kCorrupt);
  return parsed.error().field;
}

TEST(EngineTrace, SurvivesTheWire) {
  for (EngineTrace trace : {EngineTrace{}, sample_trace()}) {
    trace.received.resize(kReceived, 9);
    const auto again = parse_trace(as_bytes(encode_trace(trace)));
    ASSERT_TRUE(again.ok()) << again.error().message;
    EXPECT_EQ(*again, trace);
  }
}

TEST(EngineTrace, EveryFieldButOneIsNeededAndAllAreNamed) {
  for (const auto& [name, value] : sample_json().items()) {
    Json without = sample_json();
    without.erase(name);
    EXPECT_EQ(fault(without), name == "kv_tokens" ? "none" : name);  // which older workers do not say
    for (const Json& wrong : {Json(-1), Json("1"), Json(), Json(true), Json(std::nan("")), Json(-0.5),
                              Json(std::numeric_limits<double>::infinity()), Json::array({-1}), Json::array({1.0})}) {
      Json with = sample_json();
      with[name] = wrong;
      EXPECT_EQ(fault(with), name) << wrong;
    }
  }
}

TEST(EngineTrace, BoundsAreInclusive) {
  const std::vector<std::pair<std::string, Json>> most = {{"v", 1},
                                                          {"rank", kMostEngines - 1},
                                                          {"remaining_prefill_tokens", kMostTraceTokens},
                                                          {"waiting_prefill_tokens", kMostTraceTokens},
                                                          {"running", UINT32_MAX},
                                                          {"waiting", UINT32_MAX}};
  for (const auto& [name, value] : most) {
    Json json = sample_json();
    json[name] = value;
    EXPECT_EQ(fault(json), "none") << name;
    json[name] = value.get<uint64_t>() + 1;
    EXPECT_EQ(fault(json), name);
  }
  Json json = sample_json();
  json["kv_usage"] = 1;  // an integer is a number
  EXPECT_EQ(parse(json)->kv_usage, 1.0);
  json["kv_usage"] = 1.0000001;
  EXPECT_EQ(fault(json), "kv_usage");
  json = sample_json();
  json["received"] = std::vector<uint64_t>(kReceived + 1);
  EXPECT_EQ(fault(json), "received");
  json = sample_json();
  json["v"] = 0;
  EXPECT_EQ(fault(json), "v");
}

TEST(EngineTrace, LaterVersionsMayAddFields) {
  Json json = sample_json();
  json["new"] = {{"a", 1}};
  ASSERT_TRUE(parse(json).ok());
  EXPECT_EQ(*parse(json), sample_trace());
}

TEST(EngineTrace, WhatIsNoMapIsCorrupt) {
  for (const Json& json : {Json(), Json(7), Json::array({1}), Json("trace")}) EXPECT_EQ(fault(json), "");
  const std::string bytes = encode_trace(sample_trace());
  for (size_t size = 0; size < bytes.size(); ++size) {
    const auto parsed = parse_trace(as_bytes(std::string_view(bytes).substr(0, size)));
    ASSERT_FALSE(parsed.ok());
    EXPECT_EQ(parsed.error().code, ErrorCode::kCorrupt);
  }
}

}  // namespace
}  // namespace kindred::fleet
