// Disaggregated requests between two workers: what comes out equals what one worker gives, and what
// becomes of bad handoffs.
#include <fmt/format.h>

#include "base/bytes.h"
#include "engine/lease_store.h"
#include "engine/worker_testing.h"

namespace kindred::engine {
namespace {

using namespace testing;

const std::string kChatPath = "/v1/chat/completions";

json chat(const std::string& content, const json& more = json::object()) {
  json body = {{"messages", {{{"role", "user"}, {"content", content}}}},
               {"temperature", 0},
               {"cache_prompt", false},
               {"max_tokens", 24}};
  body.update(more);
  return body;
}

json completion(const json& prompt, const json& more = json::object()) {
  json body = {{"prompt", prompt}, {"temperature", 0}, {"cache_prompt", false}, {"max_tokens", 24}};
  body.update(more);
  return body;
}

// Serves one blob under any lease.
class FakePeer {
 public:
  explicit FakePeer(Loop& loop) : loop_(loop) {
    loop_.post([&] {
      server_ = std::make_unique<net::HttpServer>(
          loop_.executor(), net::ServerOptions{},
          [this](net::Request&, net::ResponseWriter& writer) { return answer(writer); });
      endpoint_ = {"127.0.0.1", *server_->listen("127.0.0.1", 0)};
    });
  }
  ~FakePeer() {
    loop_.run(server_->drain(std::chrono::milliseconds(100)));
    loop_.post([&] { server_.reset(); });
  }
  const net::Endpoint& endpoint() const { return endpoint_; }
  std::string blob;

 private:
  net::Task<void> answer(net::ResponseWriter& writer) {
    net::Headers headers;
    co_await writer.send(200, std::move(headers), blob);
  }
  Loop& loop_;
  std::unique_ptr<net::HttpServer> server_;
  net::Endpoint endpoint_;
};

class HandoffTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    loop_ = std::make_unique<Loop>();
    fake_ = std::make_unique<FakePeer>(*loop_);
    prefill_ = std::make_unique<Node>(*loop_, role(Role::kPrefill));
    WorkerOptions options = role(Role::kDecode);
    options.peers = {prefill_->endpoint(), fake_->endpoint()};
    decode_ = std::make_unique<Node>(*loop_, options);
    plain_ = std::make_unique<Node>(*loop_, role(Role::kBoth));
  }
  static void TearDownTestSuite() {
    plain_.reset();
    decode_.reset();
    prefill_.reset();
    fake_.reset();
    loop_.reset();
  }

  static Reply prefill_leg(const std::string& path, const json& body) {
    return prefill_->post(path, body, {{"X-Kindred-Leg", "prefill"}});
  }
  static json handoff_of(const json& reply) {
    return {{"v", 1},
            {"from", prefill_->endpoint().url()},
            {"fingerprint", reply["fingerprint"]},
            {"lease", reply["lease"]},
            {"state", reply["state"]}};
  }
  static Reply decode_leg(const std::string& path, const json& body, const json& handoff) {
    const std::string tail = handoff.dump();
    return decode_->request("POST", path, body.dump() + tail,
                            {{"X-Kindred-Leg", "decode"}, {"X-Kindred-Handoff-Bytes", std::to_string(tail.size())}});
  }
  // Both legs, as a router runs them; gives what the client gets.
  static std::string through_handoff(const std::string& path, const json& body) {
    const Reply reply = prefill_leg(path, body);
    EXPECT_EQ(reply.status, 200) << reply.body;
    if (reply.status != 200) return reply.body;
    EXPECT_EQ(*reply.headers.find("Content-Type"), "application/vnd.kindred.prefill+json");
    const json parsed = reply.parsed();
    const std::string first = parsed["first"];
    finished_ = parsed["finished"];
    if (finished_) {
      EXPECT_FALSE(parsed.contains("lease") || parsed.contains("state"));
      return first;
    }
    const Reply rest = decode_leg(path, body, handoff_of(parsed));
    EXPECT_EQ(rest.status, 200) << rest.body;
    EXPECT_EQ(*rest.headers.find("Content-Type"), parsed["content_type"].get<std::string>());
    EXPECT_FALSE(rest.cut);
    prefill_->post("/v1/kv_transfer/release", {{"lease", parsed["lease"]["id"]}});
    return first + rest.body;
  }
  static void expect_equal(const std::string& path, json body) {
    for (const bool stream : {true, false}) {
      body["stream"] = stream;
      const Reply whole = plain_->post(path, body);
      ASSERT_EQ(whole.status, 200) << whole.body;
      EXPECT_EQ(without_identity(through_handoff(path, body)), without_identity(whole.body)) << body.dump();
    }
  }

  static inline std::unique_ptr<Loop> loop_;
  static inline std::unique_ptr<FakePeer> fake_;
  static inline std::unique_ptr<Node> prefill_, decode_, plain_;
  static inline bool finished_ = false;
};

TEST_F(HandoffTest, EqualsOneWorkerGreedyAndSeeded) {
  for (const char* text : {"def main():", "Was ist ein Vertrag?", "Compute 3 + 4.", "日本語の説明"}) {
    expect_equal(kChatPath, chat(text));
    expect_equal(kChatPath, chat(text, {{"temperature", 1.0}, {"seed", 42}, {"top_p", 0.9}, {"ignore_eos", true}}));
  }
}

TEST_F(HandoffTest, EqualsOneWorkerInEveryField) {
  expect_equal(kChatPath, chat("class A:", {{"logprobs", true},
                                            {"top_logprobs", 3},
                                            {"n", 3},
                                            {"temperature", 1.0},
                                            {"seed", -5},
                                            {"return_token_ids", true}}));
  expect_equal(kChatPath, chat("class A:", {{"return_expert_counts", true}, {"ignore_eos", true}}));
  expect_equal(kChatPath, chat("class A:", {{"return_expert_gates", true}, {"ignore_eos", true}}));
  expect_equal(kChatPath, chat("class A:", {{"return_expert_gates", true}, {"max_tokens", 1}}));
  expect_equal(
      kChatPath,
      chat("int x = 1;",
           {{"presence_penalty", 1.5}, {"frequency_penalty", 0.7}, {"repetition_penalty", 1.3}, {"ignore_eos", true}}));
  expect_equal(kChatPath,
               chat("int x = 1;", {{"logit_bias", {{"5", 90}, {"6", 90}}}, {"temperature", 1}, {"seed", 1}}));
  expect_equal(kChatPath, chat("hi", {{"stream_options", {{"include_usage", true}}}, {"min_tokens", 20}}));
  expect_equal("/v1/completions", completion("The court", {{"logprobs", 2}, {"return_token_ids", true}}));
}

TEST_F(HandoffTest, EqualsOneWorkerAtTheEdges) {
  expect_equal("/v1/completions", completion({100}));  // one token
  json longest = json::array();
  for (int i = 0; i < 500; ++i) longest.push_back(300 + i % 97);
  expect_equal("/v1/completions", completion(longest, {{"max_tokens", 12}, {"ignore_eos", true}}));
  longest.erase(longest.begin(), longest.begin() + 1);
  for (int i = 0; i < 12; ++i) longest.push_back(300);
  expect_equal("/v1/completions", completion(longest, {{"max_tokens", 1}}));
  EXPECT_TRUE(finished_);
  expect_equal(kChatPath, chat("x", {{"max_tokens", 1}, {"n", 2}, {"return_expert_counts", true}}));
  EXPECT_TRUE(finished_);
  expect_equal(kChatPath, chat("x", {{"max_tokens", 2}}));
}

// Stop strings that end in the first token, straddle the handoff, or begin after it.
TEST_F(HandoffTest, EqualsOneWorkerAroundStopStrings) {
  const std::string text =
      plain_->post(kChatPath, chat("def f(x):", {{"ignore_eos", true}})).parsed()["choices"][0]["message"]["content"];
  ASSERT_GT(text.size(), 8U);
  for (size_t length = 1; length <= 8; ++length)
    expect_equal(kChatPath, chat("def f(x):", {{"ignore_eos", true}, {"stop", text.substr(0, length)}}));
  for (size_t begin = 1; begin <= 4; ++begin)
    expect_equal(kChatPath, chat("def f(x):", {{"ignore_eos", true}, {"stop", {text.substr(begin, 5), "never"}}}));
}

// Bias makes the model say the pieces of an emoji only, so that the handoff cuts between its bytes.
TEST_F(HandoffTest, EqualsOneWorkerInsideACharacter) {
  const json pieces = plain_->post("/tokenize", {{"prompt", "😀"}}).parsed()["tokens"];
  ASSERT_GT(pieces.size(), 1U);
  bool held = false;
  for (int favour = 0; favour <= 30; favour += 10) {  // the first piece: from now and then to always
    json bias = json::object();
    for (const json& piece : pieces) bias[std::to_string(piece.get<int>())] = 70;
    bias[std::to_string(pieces[0].get<int>())] = 70 + favour;
    const json body = chat("x", {{"logit_bias", bias}, {"temperature", 2}, {"max_tokens", 6}, {"seed", 3}});
    expect_equal(kChatPath, body);
    held |= prefill_leg(kChatPath, body).parsed()["state"]["choices"][0]["held"] != "";
  }
  EXPECT_TRUE(held);
}

TEST_F(HandoffTest, DecodeWorkersEvaluateNoPrompt) {
  through_handoff(kChatPath, chat("for i in range(10):"));
  EXPECT_EQ(decode_->metric("kindred_prompt_tokens_evaluated_total"), 0);
  EXPECT_GT(decode_->metric("kindred_kv_pull_seconds_count"), 0);
}

TEST_F(HandoffTest, LeasesArePulledRenewedAndReleased) {
  const json reply = prefill_leg(kChatPath, chat("hello")).parsed();
  const std::string id = reply["lease"]["id"];
  EXPECT_EQ(reply["lease"]["ttl_ms"], 30000);
  EXPECT_GE(prefill_->metric("kindred_leases"), 1);
  for (int i = 0; i < 2; ++i) {
    const Reply blob = prefill_->get("/v1/kv/" + id);
    EXPECT_EQ(blob.status, 200);
    EXPECT_EQ(blob.body.size(), reply["lease"]["bytes"]);
    EXPECT_EQ(*blob.headers.find("X-Kindred-Hash"), reply["lease"]["hash"].get<std::string>());
  }
  EXPECT_EQ(prefill_->request("POST", "/v1/kv/" + id + "/renew").parsed(), json({{"ttl_ms", 30000}}));
  for (int i = 0; i < 2; ++i) EXPECT_EQ(prefill_->post("/v1/kv_transfer/release", {{"lease", id}}).status, 200);
  EXPECT_EQ(prefill_->get("/v1/kv/" + id).status, 404);
  EXPECT_EQ(prefill_->request("POST", "/v1/kv/" + id + "/renew").status, 404);
  const Reply late = decode_leg(kChatPath, chat("hello"), handoff_of(reply));
  EXPECT_EQ(late.status, 502);
  EXPECT_EQ(late.code(), "kv_pull_failed");
}

TEST_F(HandoffTest, ExpiredLeasesAreGone) {
  WorkerOptions options = role(Role::kPrefill);
  options.lease_ttl = std::chrono::milliseconds(150);
  Node brief(*loop_, options);
  const json reply = brief.post(kChatPath, chat("hello"), {{"X-Kindred-Leg", "prefill"}}).parsed();
  EXPECT_EQ(brief.get("/v1/kv/" + reply["lease"]["id"].get<std::string>()).status, 200);
  EXPECT_TRUE(brief.becomes("kindred_leases", 0));
  EXPECT_EQ(brief.metric("kindred_lease_bytes"), 0);
  EXPECT_EQ(brief.get("/v1/kv/" + reply["lease"]["id"].get<std::string>()).status, 404);
}

TEST_F(HandoffTest, AFullLeaseStoreIsSaidSo) {
  WorkerOptions options = role(Role::kPrefill);
  options.lease_bytes = 1000;
  Node tiny(*loop_, options);
  const Reply reply = tiny.post(kChatPath, chat("hello"), {{"X-Kindred-Leg", "prefill"}});
  EXPECT_EQ(reply.status, 429);
  EXPECT_EQ(tiny.post(kChatPath, chat("hello", {{"max_tokens", 1}}), {{"X-Kindred-Leg", "prefill"}}).status, 200);
}

TEST_F(HandoffTest, RefusesForeignModelsAndPeers) {
  const json body = chat("hello");
  const json good = handoff_of(prefill_leg(kChatPath, body).parsed());
  json bad = good;
  bad["fingerprint"] = "0123456789abcdef";
  EXPECT_EQ(decode_leg(kChatPath, body, bad).status, 409);
  EXPECT_EQ(decode_leg(kChatPath, body, bad).code(), "fingerprint_mismatch");
  bad = good;
  bad["from"] = "http://127.0.0.1:1";
  EXPECT_EQ(decode_leg(kChatPath, body, bad).status, 403);
  EXPECT_EQ(decode_leg(kChatPath, body, bad).code(), "peer_not_configured");
  EXPECT_EQ(decode_leg(kChatPath, body, good).status, 200);
}

TEST_F(HandoffTest, RefusesMalformedHandoffs) {
  const json body = chat("hello");
  const json good = handoff_of(prefill_leg(kChatPath, body).parsed());
  const std::string tail = good.dump();
  const auto send = [&](const std::string& bytes, const std::string& count) {
    HeaderList headers = {{"X-Kindred-Leg", "decode"}};
    if (!count.empty()) headers.emplace_back("X-Kindred-Handoff-Bytes", count);
    return decode_->request("POST", kChatPath, body.dump() + bytes, headers);
  };
  for (const std::string& count : {std::string(), std::string("0"), std::string("-1"), std::string("x"),
                                   std::string("99999999"), std::to_string(tail.size() - 1)}) {
    const Reply reply = send(tail, count);
    EXPECT_EQ(reply.status, 400) << count;
    EXPECT_EQ(reply.code(), "handoff_invalid") << reply.body;
  }
  json bad = good;
  bad["state"]["prompt"][0] = 1 << 20;
  EXPECT_EQ(decode_leg(kChatPath, body, bad).code(), "handoff_invalid");
  bad = good;
  bad["state"]["choices"].push_back(good["state"]["choices"][0]);  // n is 1
  EXPECT_EQ(decode_leg(kChatPath, body, bad).code(), "handoff_invalid");
}

// Blobs whose hash is right but whose contents are not, and the other way round.
TEST_F(HandoffTest, RefusesCorruptKv) {
  const json body = chat("hello there, this is a prompt of some length");
  const json reply = prefill_leg(kChatPath, body).parsed();
  const std::string blob = prefill_->get("/v1/kv/" + reply["lease"]["id"].get<std::string>()).body;
  const auto offer = [&](const std::string& bytes, bool honest_hash) {
    fake_->blob = bytes;
    json handoff = handoff_of(reply);
    handoff["from"] = fake_->endpoint().url();
    handoff["lease"]["bytes"] = bytes.size();
    if (honest_hash) handoff["lease"]["hash"] = kv_hash(as_bytes(bytes));
    return decode_leg(kChatPath, body, handoff);
  };
  EXPECT_EQ(offer(blob, true).status, 200);
  std::string flipped = blob;
  flipped[blob.size() / 2] = static_cast<char>(flipped[blob.size() / 2] ^ 1);
  EXPECT_EQ(offer(flipped, false).code(), "kv_pull_failed");
  for (const std::string& bad : {blob.substr(0, blob.size() / 2), blob.substr(0, 16), std::string(blob.size(), '\xff'),
                                 blob + "tail", std::string(4096, '\0')}) {
    const Reply refused = offer(bad, true);
    EXPECT_EQ(refused.status, 502) << bad.size();
    EXPECT_EQ(refused.code(), "kv_pull_failed");
  }
  fake_->blob = blob + "more than the lease says";
  json longer = handoff_of(reply);
  longer["from"] = fake_->endpoint().url();
  EXPECT_EQ(decode_leg(kChatPath, body, longer).code(), "kv_pull_failed");
  EXPECT_EQ(offer(blob, true).status, 200);  // and it still serves
  EXPECT_TRUE(decode_->becomes("vllm:num_requests_running", 0));
}

}  // namespace
}  // namespace kindred::engine
