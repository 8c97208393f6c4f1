#include "router/prefixes.h"

#include <gtest/gtest.h>

#include <fmt/format.h>

#include "base/bytes.h"
#include "net/zmq.h"
#include "router/testing.h"

namespace kindred::router {
namespace {

using namespace testing;

// A prompt of `pieces` pieces that starts like all others of the same `topic`.
std::string prompt(const std::string& topic, size_t pieces, const std::string& end = {}) {
  std::string text;
  while (text.size() < pieces * kPieceBytes) text += topic + " ";
  return text + end;
}

std::string body(const std::string& text) {
  return fmt::format(R"({{"model":"m","messages":[{{"role":"user","content":"{}"}}]}})", text);
}

class PrefixesTest : public RouterTest {
 protected:
  void SetUp() override {
    options_.prefill_policy.name = "kv-aware";
    options_.kv.index_bytes = 1 << 20;
  }
  Answer ask(const std::string& text) { return call("POST", "/v1/chat/completions", body(text)); }
  Json prefixes() { return parse_json(call("GET", "/status").body)["prefixes"]; }
  static size_t chats(const FakeWorker& worker) {
    size_t out = 0;
    for (const SeenLeg& leg : worker.legs()) out += leg.path == "/v1/chat/completions" ? 1 : 0;
    return out;
  }
};

TEST_F(PrefixesTest, SentWherePromptsThatBeginAlikeWent) {
  FakeWorker& a = add(Role::kBoth, "");
  FakeWorker& b = add(Role::kBoth, "");
  start();
  const std::string topics[] = {"weather", "poetry"};
  for (const std::string& topic : topics) EXPECT_EQ(ask(prompt(topic, 8)).status, 200);
  ASSERT_EQ(chats(a), 1U);  // nothing is known yet: in turn
  ASSERT_EQ(chats(b), 1U);
  const bool weather_at_a = a.legs()[0].body.find("weather") != std::string::npos;
  for (int i = 0; i < 6; ++i) ask(prompt("weather", 8, fmt::format("turn {}", i)));
  EXPECT_EQ(chats(weather_at_a ? a : b), 7U);
  EXPECT_EQ(chats(weather_at_a ? b : a), 1U);
  const Json last = parse_json(call("GET", "/status").body)["decisions"][0];
  EXPECT_EQ(last["policy"], "kv-aware");
  EXPECT_EQ(last["reason"], "held");
  EXPECT_TRUE(prefixes()["exact"].is_null());
  EXPECT_GT(prefixes()["approximate"]["blocks"], 8);
  EXPECT_TRUE(has_metric(R"(kindred_router_prefix_lookups_total{by="what_was_sent"} 8)"));
}

TEST_F(PrefixesTest, ARestartedWorkerHoldsNothing) {
  FakeWorker& a = add(Role::kBoth, "");
  start();
  ask(prompt("weather", 8));
  const auto held = [&] { return metrics().find("kindred_router_prefix_held_tokens_total 0\n") == std::string::npos; };
  EXPECT_FALSE(held());
  a.kill();
  ASSERT_TRUE(eventually([&] { return !ready(); }));
  a.revive();
  ASSERT_TRUE(eventually([&] { return ready(); }));
  ask(prompt("weather", 8));
  EXPECT_FALSE(held());
  ask(prompt("weather", 8));
  EXPECT_TRUE(held());
}

class DecodeHeldTest : public PdFlowTest {};

TEST_F(DecodeHeldTest, AConversationGoesBackToTheDecodeWorkerThatHoldsIt) {
  prefill();
  FakeWorker& d0 = decode();
  FakeWorker& d1 = decode();
  options_.decode_policy.name = "least-loaded";
  options_.decode_policy.held_weight = 0.5;
  options_.kv.index_bytes = 1 << 20;
  start();
  const auto ask = [&](const std::string& text) { return call("POST", "/v1/chat/completions", body(text)); };
  EXPECT_EQ(ask(prompt("weather", 8)).status, 200);
  const bool at_d0 = d0.leg_count() == 1;
  for (size_t turn = 0; turn < 5; ++turn) ask(prompt("weather", 8 + turn));
  EXPECT_EQ((at_d0 ? d0 : d1).leg_count(), 6U);
  EXPECT_EQ((at_d0 ? d1 : d0).leg_count(), 0U);
}

// A worker that tokenises: one token per byte of the body behind "content".
net::Task<void> tokenise(FakeWorker& worker, const SeenLeg& leg, net::ResponseWriter& writer) {
  if (leg.path != "/tokenize") {
    co_await worker.answer_plain(leg, writer);
    co_return;
  }
  Json tokens = Json::array();
  for (const char c : leg.body.substr(leg.body.find("content") + 10)) tokens.push_back(static_cast<uint8_t>(c));
  const std::string reply = Json{{"count", tokens.size()}, {"tokens", tokens}}.dump();
  co_await writer.send(200, json_type(), reply);
}

// Publishes as vLLM does.
class Publisher {
 public:
  std::string endpoint() const { return socket_.endpoint(); }
  void stored(const std::string& text) {
    Json tokens = Json::array(), hashes = Json::array();
    for (size_t i = 0; i < text.size() / 4; ++i) hashes.push_back(i + 1);
    for (size_t i = 0; i < text.size() / 4 * 4; ++i) tokens.push_back(static_cast<uint8_t>(text[i]));
    const Json event = Json::array({"BlockStored", hashes, nullptr, tokens, 4, nullptr});
    const auto bytes = Json::to_msgpack(Json::array({1.0, Json::array({event})}));
    const std::string number(8, '\0');  // always the first: each message is a fresh start
    (void)socket_.send(std::array<std::string_view, 3>{"", number, as_text(bytes)});
  }

 private:
  net::ZmqContext context_;
  net::ZmqSocket socket_ = *net::ZmqSocket::bind(context_, net::ZmqKind::kPublisher, "tcp://127.0.0.1:*");
};

TEST_F(PrefixesTest, EventsSayExactlyWhoHoldsAPrompt) {
  FakeWorker& a = add(Role::kBoth, "");
  FakeWorker& b = add(Role::kBoth, "");
  Publisher from_a, from_b;
  options_.kv.events = {a.url() + "=" + from_a.endpoint(), b.url() + "=" + from_b.endpoint()};
  for (FakeWorker* worker : {&a, &b}) {
    worker->play([worker](const SeenLeg& leg, net::Request&, net::ResponseWriter& writer) {
      return tokenise(*worker, leg, writer);
    });
  }
  start();
  const std::string text = prompt("sea", 1);
  ASSERT_TRUE(eventually([&] {
    from_a.stored("else");
    from_b.stored(text);
    return prefixes()["exact"]["workers"] == 2;
  }));
  for (int i = 0; i < 4; ++i) EXPECT_EQ(ask(text + std::to_string(i)).status, 200);
  EXPECT_EQ(chats(a), 0U);
  EXPECT_EQ(chats(b), 4U);
  EXPECT_TRUE(has_metric(R"(kindred_router_prefix_lookups_total{by="events"} 4)"));
  // The same prompt again is not tokenised again.
  const size_t before = a.leg_count() + b.leg_count();
  ask(text + "0");
  EXPECT_EQ(a.leg_count() + b.leg_count(), before + 1);
}

TEST_F(PrefixesTest, WithoutTokensInTimeItGoesByWhatWasSent) {
  FakeWorker& a = add(Role::kBoth, "");
  Publisher from_a;
  options_.kv.events = {a.url() + "=" + from_a.endpoint()};
  options_.kv.tokenize_timeout_ms = 50ms;
  a.play([&a](const SeenLeg& leg, net::Request& request, net::ResponseWriter& writer) -> net::Task<void> {
    if (leg.path == "/tokenize") co_await hang(leg, request, writer);
    else co_await a.answer_plain(leg, writer);
  });
  start();
  ASSERT_TRUE(eventually([&] {
    from_a.stored("else");
    return prefixes()["exact"]["workers"] == 1;
  }));
  EXPECT_EQ(ask(prompt("sea", 4)).status, 200);
  EXPECT_TRUE(has_metric("kindred_router_tokenize_failures_total 1"));
  EXPECT_TRUE(has_metric(R"(kindred_router_prefix_lookups_total{by="what_was_sent"} 1)"));
}

TEST(KvOptions, AWrongSourceIsNamed) {
  for (const char* text :
       {"tcp://h:1", "http://h:1", "http://h:1=h:2", "nonsense=tcp://h:1", "http://h:1=tcp://h:1,x"}) {
    KvOptions options;
    options.events = {text};
    const auto made = Prefixes::make(options, 1);
    ASSERT_FALSE(made.ok()) << text;
    EXPECT_EQ(made.error().field, "kv_events");
    EXPECT_NE(made.error().message.find(text), std::string::npos);
  }
}

TEST(TokenCache, KeepsTheLastUsedWithinItsBound) {
  TokenCache cache(3000);
  const auto tokens = [](size_t count) { return std::make_shared<const std::vector<uint32_t>>(count); };
  for (int i = 0; i < 100; ++i) {
    cache.add(TokenCache::key(std::to_string(i)), tokens(100));
    EXPECT_TRUE(cache.find(TokenCache::key("0")));  // used each time
    EXPECT_LE(cache.bytes(), 3000U);
  }
  EXPECT_FALSE(cache.find(TokenCache::key("50")));
  EXPECT_EQ(cache.find(TokenCache::key("99"))->size(), 100U);
  cache.add(TokenCache::key("huge"), tokens(10'000));
  EXPECT_FALSE(cache.find(TokenCache::key("huge")));
  EXPECT_TRUE(cache.find(TokenCache::key("0")));
}

}  // namespace
}  // namespace kindred::router
