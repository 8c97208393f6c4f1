#include "engine/handoff.h"
#include "base/json.h"
#include "engine/openai_request.h"

#include <gtest/gtest.h>

namespace kindred::engine {
namespace {

using json = Json;

constexpr HandoffLimits kLimits{100, 64, 1 << 20};

expert::ExpertCounts counts_of(uint32_t tokens) {
  expert::ExpertCounts counts(expert::ExpertShape{{0, 1}, 2, 1});
  counts.tokens = tokens;
  counts.data = {tokens, 0, 0, tokens};
  return counts;
}

PrefillReply example() {
  PrefillReply reply;
  reply.content_type = "application/json";
  reply.usage = {3, 1, 2};
  reply.n = 2;
  reply.max_tokens = 9;
  reply.fingerprint = "f00d";
  reply.counts = counts_of(3);
  reply.suffix = counts_of(2);
  reply.lease = Lease{"abc123", 4096, std::string(32, 'a'), std::chrono::milliseconds(30000)};
  HandoffState state;
  state.id = "chatcmpl-1";
  state.created = 1700000000;
  state.model = "tiny \"q\"";
  state.max_tokens = 9;
  state.prompt = {1, 2, 99};
  state.usage = reply.usage;
  state.choices.resize(2);
  state.choices[0].seed = 0xfedcba9876543210ULL;
  state.choices[0].held = std::string("\xf0\x9f\0x", 4);
  state.choices[0].progress.text = "h\"i";
  state.choices[0].progress.tokens = {{5, -0.123456789F, {{5, -0.25F}, {6, -INFINITY}}}};
  state.choices[1].seed = 1;
  state.choices[1].progress.tokens = {{7, 0, {}}};
  state.choices[1].progress.finish = FinishReason::kStop;
  state.counts = counts_of(3);
  state.suffix = counts_of(2);
  state.gates = expert::ExpertGates{{0, 2}, 2, {0.5F, 2.5F, 3, 0}};
  reply.state = std::move(state);
  return reply;
}

// The handoff as the router makes it of a prefill reply.
json handoff_of(const PrefillReply& reply) {
  const json parsed = json::parse(write_prefill_reply(reply));
  return {{"v", 1},
          {"from", "http://10.0.0.1:8100"},
          {"fingerprint", parsed["fingerprint"]},
          {"lease", parsed["lease"]},
          {"state", parsed["state"]}};
}

TEST(Handoff, PrefillReplyHasTheFieldsOfTheDialect) {
  const json reply = json::parse(write_prefill_reply(example()));
  EXPECT_EQ(reply["v"], 1);
  EXPECT_EQ(reply["finished"], false);
  EXPECT_EQ(reply["content_type"], "application/json");
  EXPECT_EQ(reply["first"], "");
  EXPECT_EQ(reply["usage"], json({{"prompt_tokens", 3}, {"cached_tokens", 1}, {"completion_tokens", 2}}));
  EXPECT_EQ(reply["n"], 2);
  EXPECT_EQ(reply["max_tokens"], 9);
  EXPECT_EQ(reply["fingerprint"], "f00d");
  EXPECT_EQ(reply["expert_counts"]["tokens"], 3);
  EXPECT_EQ(reply["expert_counts"]["suffix"]["tokens"], 2);
  EXPECT_EQ(reply["lease"],
            json({{"id", "abc123"}, {"bytes", 4096}, {"hash", std::string(32, 'a')}, {"ttl_ms", 30000}}));
  EXPECT_EQ(reply["releases"], kMostReleases);
  EXPECT_TRUE(reply["state"].is_object());
  PrefillReply finished;
  finished.finished = true;
  finished.first = "data: x\n\n";
  const json end = json::parse(write_prefill_reply(finished));
  EXPECT_EQ(end["first"], "data: x\n\n");
  for (const char* absent : {"lease", "state", "expert_counts"}) EXPECT_FALSE(end.contains(absent)) << absent;
}

TEST(Handoff, RoundTrips) {
  const PrefillReply reply = example();
  const auto handoff = parse_handoff(handoff_of(reply).dump(), kLimits);
  ASSERT_TRUE(handoff.ok()) << handoff.error().message;
  EXPECT_EQ(handoff->from.text(), "10.0.0.1:8100");
  EXPECT_EQ(handoff->fingerprint, "f00d");
  EXPECT_EQ(handoff->lease.id, "abc123");
  EXPECT_EQ(handoff->lease.bytes, 4096U);
  const HandoffState &in = *reply.state, &out = handoff->state;
  EXPECT_EQ(out.id, in.id);
  EXPECT_EQ(out.created, in.created);
  EXPECT_EQ(out.model, in.model);
  EXPECT_EQ(out.max_tokens, in.max_tokens);
  EXPECT_EQ(out.prompt, in.prompt);
  EXPECT_EQ(out.usage.cached_tokens, 1U);
  EXPECT_EQ(out.counts->data, in.counts->data);
  EXPECT_EQ(out.suffix->tokens, 2U);
  ASSERT_EQ(out.choices.size(), 2U);
  EXPECT_EQ(out.choices[0].progress.text, "h\"i");
  EXPECT_EQ(out.choices[0].progress.tokens[0].logprob, -0.123456789F);
  EXPECT_EQ(out.choices[0].progress.tokens[0].top[1].logprob, -9999);
  const ChoiceState first = choice_state(out.choices[0]), second = choice_state(out.choices[1]);
  EXPECT_EQ(first.seed, 0xfedcba9876543210ULL);
  EXPECT_EQ(first.generated, std::vector<Token>{5});
  EXPECT_EQ(first.held, in.choices[0].held);
  EXPECT_EQ(first.finish, FinishReason::kNone);
  EXPECT_EQ(second.finish, FinishReason::kStop);
}

void expect_refused(const json& handoff, const std::string& what) {
  const auto parsed = parse_handoff(handoff.dump(), kLimits);
  ASSERT_FALSE(parsed.ok()) << what;
  EXPECT_EQ(parsed.error().code, ErrorCode::kInvalid) << what;
  EXPECT_FALSE(parsed.error().message.empty());
}

TEST(Handoff, RefusesBadValues) {
  const json good = handoff_of(example());
  ASSERT_TRUE(parse_handoff(good.dump(), kLimits).ok());
  json long_prompt = json::array(), many_choices = json::array(), many_tops = json::array();
  for (int i = 0; i < 64; ++i) long_prompt.push_back(1);
  for (int i = 0; i < 17; ++i) many_choices.push_back(good["state"]["choices"][0]);
  for (int i = 0; i < 21; ++i) many_tops.push_back({1, -1.0});
  const std::vector<std::pair<std::string, json>> cases = {
      {"/v", 2},
      {"/v", "1"},
      {"/from", "nowhere"},
      {"/from", 5},
      {"/fingerprint", ""},
      {"/fingerprint", nullptr},
      {"/lease/id", ""},
      {"/lease/id", "../../etc"},
      {"/lease/id", "a b"},
      {"/lease/id", std::string(65, 'a')},
      {"/lease/bytes", 0},
      {"/lease/bytes", (1 << 20) + 1},
      {"/lease/bytes", -1},
      {"/lease/hash", "xyz"},
      {"/lease/hash", std::string(32, 'g')},
      {"/lease", "x"},
      {"/state", json::array()},
      {"/state/id", ""},
      {"/state/id", std::string(600, 'a')},
      {"/state/created", "now"},
      {"/state/max_tokens", 0},
      {"/state/max_tokens", 62},
      {"/state/prompt", json::array()},
      {"/state/prompt", {1, 100}},
      {"/state/prompt", {-1}},
      {"/state/prompt", {1.5}},
      {"/state/prompt", "text"},
      {"/state/prompt", long_prompt},
      {"/state/usage", nullptr},
      {"/state/usage/cached_tokens", -1},
      {"/state/choices", json::array()},
      {"/state/choices", many_choices},
      {"/state/choices", {1}},
      {"/state/choices/0/seed", "12"},
      {"/state/choices/0/seed", 12},
      {"/state/choices/0/held", "!"},
      {"/state/choices/0/held", nullptr},
      {"/state/choices/0/text", "===="},
      {"/state/choices/0/finish", "cancelled"},
      {"/state/choices/0/finish", "stop"},  // then none goes on
      {"/state/choices/0/tokens", json::array()},
      {"/state/choices/0/tokens", {5}},
      {"/state/choices/0/tokens/0/id", 100},
      {"/state/choices/0/tokens/0/id", -1},
      {"/state/choices/0/tokens/0/top", many_tops},
      {"/state/choices/0/tokens/0/top/0", {100, -1}},
      {"/state/choices/0/tokens/0/top/0", 7},
      {"/state/expert_counts/tokens", 4},
      {"/state/expert_counts/data", "AAAA"},
      {"/state/expert_counts/suffix", 5},
      {"/state/expert_gates/data", "AAAA"},
      {"/state/expert_gates", 5},
  };
  for (const auto& [path, value] : cases) {
    json bad = good;
    bad[json::json_pointer(path)] = value;
    expect_refused(bad, path + " = " + value.dump());
  }
  json full = good;
  full["state"]["max_tokens"] = 1;  // and a choice that goes on
  expect_refused(full, "max_tokens reached");
}

TEST(Handoff, RefusesWhatIsMissing) {
  const json good = handoff_of(example());
  for (const char* path : {"/v",
                           "/from",
                           "/fingerprint",
                           "/lease",
                           "/lease/id",
                           "/lease/bytes",
                           "/lease/hash",
                           "/state",
                           "/state/id",
                           "/state/created",
                           "/state/model",
                           "/state/max_tokens",
                           "/state/prompt",
                           "/state/usage",
                           "/state/usage/prompt_tokens",
                           "/state/choices",
                           "/state/choices/0/seed",
                           "/state/choices/0/held",
                           "/state/choices/0/finish",
                           "/state/choices/0/tokens",
                           "/state/choices/0/tokens/0/id"}) {
    const json::json_pointer at(path);
    json bad = good;
    bad[at.parent_pointer()].erase(at.back());
    expect_refused(bad, path);
  }
}

TEST(Handoff, RefusesEveryTruncation) {
  const std::string whole = handoff_of(example()).dump();
  for (size_t size = 0; size < whole.size(); ++size)
    ASSERT_FALSE(parse_handoff(std::string_view(whole).substr(0, size), kLimits).ok()) << size;
}

}  // namespace
}  // namespace kindred::engine
