// A fleet over real sockets: each dialect's legs as a router sends them, and what faults do.

#include "live/fleet.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>

#include "base/bytes.h"
#include "base/json.h"
#include "fleet/kv_index.h"
#include "live/leases.h"
#include "net/chunked.h"
#include "net/http_message.h"
#include "net/testing.h"
#include "net/zmq.h"
#include "sim/cluster_testing.h"

namespace kindred::live {
namespace {

using namespace std::chrono_literals;

struct Reply {
  int status = 0;
  std::string body;
  bool complete = false;  // the body ended as it should
  Json json() const { return parse_json(body); }
};

Reply read_reply(const std::string& wire) {
  Reply out;
  const size_t head_end = wire.find("\r\n\r\n");
  if (head_end == std::string::npos) return out;
  const auto head = net::parse_response_head(std::string_view(wire).substr(0, head_end + 4), {});
  if (!head) return out;
  out.status = head->status;
  std::string_view rest = std::string_view(wire).substr(head_end + 4);
  if (head->headers.find("Transfer-Encoding") == nullptr) {
    out.body = rest;
    const std::string_view* const length = head->headers.find("Content-Length");
    out.complete = length != nullptr && *length == std::to_string(rest.size());
    return out;
  }
  net::ChunkTracker tracker;
  while (!rest.empty() && !tracker.done() && !tracker.failed()) {
    std::string_view payload;
    rest.remove_prefix(tracker.next(rest, payload));
    out.body += payload;
  }
  out.complete = tracker.done();
  return out;
}

std::string post_text(const std::string& path, const std::string& body, const std::string& headers = {}) {
  return fmt::format("POST {} HTTP/1.1\r\nHost: w\r\nConnection: close\r\nContent-Length: {}\r\n{}\r\n{}", path,
                     body.size(), headers, body);
}

constexpr std::string_view kChat = "/v1/chat/completions";

std::string chat_text(uint32_t max_tokens, bool stream, const std::string& more = {}) {
  return fmt::format(
      R"({{"model":"simulated","messages":[{{"role":"user","content":"what time is it"}}],"max_tokens":{},"stream":{}{}}})",
      max_tokens, stream, more);
}

// The words of a stream, or of a whole answer.
std::string words(const std::string& body) {
  const Json whole = parse_json(body);
  if (whole.is_object()) return whole["choices"][0]["message"]["content"];
  std::string out;
  for (size_t at = 0; (at = body.find("data: {", at)) != std::string::npos;) {
    const size_t end = body.find("\n\n", at);
    const Json event = parse_json(body.substr(at + 6, end - at - 6));
    if (!event["choices"].empty()) out += event["choices"][0]["delta"].value("content", "");
    at = end;
  }
  return out;
}

class FleetTest : public ::testing::Test {
 protected:
  std::optional<uint16_t> kv_events_;

  void start(fleet::Dialect dialect, std::vector<Role> roles, double step_s = 0.001,
             std::chrono::milliseconds ttl = 30s) {
    sim::LinearCost cost;
    cost.host_s = step_s;
    LiveOptions options;
    options.dialect = dialect;
    options.lease_ttl_ms = ttl;
    options.kv_events_port = kv_events_;
    for (const Role role : roles) {
      WorkerSpec spec;
      spec.role = role;
      spec.loop.cost = std::make_shared<sim::LinearCost>(cost);
      spec.loop.engine.kv = {.blocks = 4096, .block_tokens = 16, .piece_tokens = 16, .cache = role != Role::kDecode};
      options.workers.push_back(std::move(spec));
    }
    loop_.call([&] {
      auto experts = sim::make_uniform(sim::testing::small_shape(), 1);
      auto made = LiveFleet::make(loop_.executor(), std::move(options), *std::move(experts), clock_);
      EXPECT_TRUE(made.ok()) << (made.ok() ? "" : made.error().message);
      if (made) fleet_ = *std::move(made);
      return 0;
    });
    ASSERT_TRUE(fleet_);
    ports_.assign(fleet_->ports().begin(), fleet_->ports().end());
  }
  void TearDown() override {
    if (fleet_) {
      loop_.run([this]() -> net::Task<int> {
        co_await fleet_->drain(200ms);
        co_return 0;
      });
      loop_.call([this] {
        fleet_.reset();
        return 0;
      });
    }
    loop_.stop();
  }

  Reply post(uint32_t worker, const std::string& body, const std::string& headers = {},
             const std::string& path = std::string(kChat)) {
    net::testing::RawConnection connection = net::testing::raw_connect(ports_.at(worker));
    connection.send(post_text(path, body, headers));
    return read_reply(connection.read_to_end());
  }
  Reply get(uint32_t worker, const std::string& path) {
    net::testing::RawConnection connection = net::testing::raw_connect(ports_.at(worker));
    connection.send(fmt::format("GET {} HTTP/1.1\r\nHost: w\r\nConnection: close\r\n\r\n", path));
    return read_reply(connection.read_to_end());
  }
  void apply(Fault fault) {
    loop_.run([&]() -> net::Task<int> {
      const Status done = co_await fleet_->apply(fault);
      EXPECT_TRUE(done.ok()) << (done.ok() ? "" : done.error().message);
      co_return 0;
    });
  }
  double metric(uint32_t worker, const std::string& name) {
    const std::string page = get(worker, "/metrics").body;
    const size_t at = page.find("\n" + name + "{");
    return at == std::string::npos ? -1 : std::stod(page.substr(page.find("} ", at) + 2));
  }

  std::string handoff(const Json& reply, uint16_t port) {
    const Json out = {{"v", 1},
                      {"from", fmt::format("http://127.0.0.1:{}", port)},
                      {"fingerprint", reply["fingerprint"]},
                      {"lease", reply["lease"]},
                      {"state", reply["state"]}};
    return out.dump();
  }
  Reply decode(uint32_t worker, const std::string& body, const std::string& handed) {
    return post(worker, body + handed,
                fmt::format("X-Kindred-Leg: decode\r\nX-Kindred-Handoff-Bytes: {}\r\n", handed.size()));
  }

  SystemClock clock_;
  net::testing::TestLoop loop_;
  std::unique_ptr<LiveFleet> fleet_;
  std::vector<uint16_t> ports_;
};

constexpr const char* kPrefillLeg = "X-Kindred-Leg: prefill\r\n";

TEST_F(FleetTest, PlainAnswersAreTheSameStreamedOrNot) {
  start(fleet::Dialect::kOpenAi, {Role::kBoth});
  const Reply streamed = post(0, chat_text(6, true, R"(,"stream_options":{"include_usage":true})"));
  const Reply whole = post(0, chat_text(6, false));
  EXPECT_EQ(streamed.status, 200);
  EXPECT_TRUE(streamed.complete);
  EXPECT_TRUE(streamed.body.ends_with("data: [DONE]\n\n"));
  EXPECT_NE(streamed.body.find(R"("completion_tokens":6)"), std::string::npos);
  EXPECT_EQ(words(streamed.body), words(whole.body));
  EXPECT_EQ(metric(0, "vllm:generation_tokens_total"), 12);
  EXPECT_EQ(metric(0, "vllm:num_requests_running"), 0);
}

TEST_F(FleetTest, BadRequestsGetClearErrors) {
  start(fleet::Dialect::kOpenAi, {Role::kBoth});
  EXPECT_EQ(post(0, "{").status, 400);
  EXPECT_EQ(post(0, chat_text(6, false, R"(,"n":3)")).json()["error"]["param"], "n");
  EXPECT_EQ(get(0, "/nowhere").status, 404);
  EXPECT_EQ(post(0, "{}", {}, "/v1/embeddings").status, 404);
}

TEST_F(FleetTest, KindredHandsOver) {
  start(fleet::Dialect::kKindred, {Role::kPrefill, Role::kDecode});
  const std::string body = chat_text(5, true);
  const Json reply = post(0, body, kPrefillLeg).json();
  ASSERT_TRUE(reply.is_object());
  EXPECT_FALSE(reply["finished"].get<bool>());
  const auto counts = expert::counts_from_json(reply["expert_counts"].dump());
  ASSERT_TRUE(counts.ok()) << counts.error().message;
  EXPECT_EQ(counts->tokens, reply["usage"]["prompt_tokens"].get<uint64_t>());
  const std::string id = reply["lease"]["id"];
  EXPECT_EQ(blob_hash(get(0, "/v1/kv/" + id).body), reply["lease"]["hash"]);
  EXPECT_EQ(post(0, "", {}, "/v1/kv/" + id + "/renew").status, 200);
  EXPECT_EQ(metric(0, "kindred_leases"), 1);

  const std::string handed = handoff(reply, ports_[0]);
  const Reply rest = decode(1, body, handed);
  EXPECT_EQ(rest.status, 200);
  EXPECT_TRUE(rest.complete);
  EXPECT_EQ(decode(1, body, handed).status, 200) << "a lease can be pulled again";
  const std::string together = words(reply["first"].get<std::string>() + rest.body);

  const std::string quiet = chat_text(5, false);
  const Json second = post(0, quiet, kPrefillLeg).json();
  EXPECT_EQ(second["usage"]["cached_tokens"], 0) << "a prompt shorter than a block is not cached";
  EXPECT_EQ(words(decode(1, quiet, handoff(second, ports_[0])).body), together);

  for (const std::string& lease : {id, second["lease"]["id"].get<std::string>()}) {
    EXPECT_EQ(post(0, Json{{"lease", lease}}.dump(), {}, "/v1/kv_transfer/release").status, 200);
  }
  EXPECT_EQ(metric(0, "kindred_leases"), 0);
  EXPECT_EQ(metric(0, "vllm:kv_cache_usage_perc"), 0);
  const Reply late = decode(1, body, handed);
  EXPECT_EQ(late.status, 502);
  EXPECT_EQ(late.json()["error"]["code"], "kv_pull_failed");
}

TEST_F(FleetTest, KindredRefusesWhatIsNotForIt) {
  start(fleet::Dialect::kKindred, {Role::kPrefill, Role::kDecode});
  const std::string body = chat_text(5, false);
  EXPECT_EQ(post(0, body).json()["error"]["code"], "wrong_role");
  EXPECT_EQ(post(1, body, kPrefillLeg).json()["error"]["code"], "wrong_role");
  EXPECT_EQ(post(1, body, "X-Kindred-Leg: decode\r\n").status, 400);
  EXPECT_EQ(decode(1, body, "[]").json()["error"]["code"], "handoff_invalid");
  const Json reply = post(0, body, kPrefillLeg).json();
  EXPECT_EQ(decode(1, body, handoff(reply, 1)).status, 403);
  Json other = reply;
  other["fingerprint"] = "another";
  EXPECT_EQ(decode(1, body, handoff(other, ports_[0])).status, 409);
}

TEST_F(FleetTest, OneTokenIsFinishedAtThePrefillWorker) {
  start(fleet::Dialect::kKindred, {Role::kPrefill, Role::kDecode});
  const Json reply = post(0, chat_text(1, true), kPrefillLeg).json();
  EXPECT_TRUE(reply["finished"].get<bool>());
  EXPECT_FALSE(reply.contains("lease"));
  EXPECT_TRUE(reply["first"].get<std::string>().ends_with("data: [DONE]\n\n"));
  EXPECT_EQ(metric(0, "vllm:kv_cache_usage_perc"), 0);
}

TEST_F(FleetTest, LeasesExpireAndFreeTheirBlocks) {
  start(fleet::Dialect::kKindred, {Role::kPrefill, Role::kDecode}, 0.001, 50ms);
  const std::string body = chat_text(5, false);
  const Json reply = post(0, body, kPrefillLeg).json();
  const auto until = std::chrono::steady_clock::now() + 5s;
  while (metric(0, "vllm:kv_cache_usage_perc") > 0 && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(10ms);
  }
  EXPECT_EQ(metric(0, "vllm:kv_cache_usage_perc"), 0);
  EXPECT_EQ(decode(1, body, handoff(reply, ports_[0])).json()["error"]["code"], "kv_pull_failed");
}

TEST_F(FleetTest, VllmPassesTheTransferParameters) {
  start(fleet::Dialect::kVllm, {Role::kPrefill, Role::kDecode});
  const Json reply =
      post(0, chat_text(1, false, R"(,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false})"))
          .json();
  Json params = reply["kv_transfer_params"];
  ASSERT_TRUE(params.is_object());
  EXPECT_EQ(params["do_remote_prefill"], true);
  EXPECT_TRUE(expert::counts_from_json(params["expert_counts"].dump()).ok());
  params.erase("expert_counts");
  const std::string more = ",\"kv_transfer_params\":" + params.dump();
  const Reply whole = post(1, chat_text(4, true, more));
  EXPECT_EQ(whole.status, 200);
  EXPECT_EQ(words(whole.body), words(post(1, chat_text(4, false)).body)) << "a plain request";
  EXPECT_EQ(metric(0, "kindred_leases"), 0) << "read once, then free";
  EXPECT_EQ(post(1, chat_text(4, true, more)).json()["error"]["code"], "kv_pull_failed");
}

TEST_F(FleetTest, SglangLegsMeetInTheirRoom) {
  start(fleet::Dialect::kSglang, {Role::kPrefill, Role::kDecode});
  EXPECT_EQ(get(0, "/get_server_info").json()["disaggregation_mode"], "prefill");
  const std::string body = chat_text(4, true, R"(,"bootstrap_room":77,"bootstrap_host":"h","bootstrap_port":1)");
  for (const uint32_t first : {0U, 1U}) {  // either may come first
    net::testing::RawConnection early = net::testing::raw_connect(ports_[first]);
    early.send(post_text(std::string(kChat), body));
    std::this_thread::sleep_for(20ms);
    const Reply late = post(1 - first, body);
    const Reply other = read_reply(early.read_to_end());
    EXPECT_EQ(late.status, 200) << late.body;
    EXPECT_EQ(other.status, 200) << other.body;
    EXPECT_TRUE((first == 1 ? other : late).body.ends_with("data: [DONE]\n\n"));
  }
  EXPECT_EQ(metric(0, "kindred_leases"), 0);
  EXPECT_EQ(post(0, chat_text(4, true)).json()["error"]["param"], "bootstrap_room");
}

TEST_F(FleetTest, SglangDecodeFailsWithItsPrefillWorker) {
  start(fleet::Dialect::kSglang, {Role::kPrefill, Role::kDecode});
  const std::string body = chat_text(4, false, R"(,"bootstrap_room":78)");
  apply({.worker = 0, .kind = FaultKind::kStall});
  net::testing::RawConnection prefill = net::testing::raw_connect(ports_[0]);
  prefill.send(post_text(std::string(kChat), body));
  net::testing::RawConnection leg = net::testing::raw_connect(ports_[1]);
  leg.send(post_text(std::string(kChat), body));
  std::this_thread::sleep_for(30ms);
  apply({.worker = 0, .kind = FaultKind::kKill});
  const Reply answer = read_reply(leg.read_to_end());
  EXPECT_EQ(answer.status, 500);
  EXPECT_EQ(answer.json()["error"]["code"], "kv_transfer_failed");
}

TEST_F(FleetTest, AKilledWorkerCutsItsStreamsAndComesBackEmpty) {
  start(fleet::Dialect::kOpenAi, {Role::kBoth}, 0.005);
  net::testing::RawConnection connection = net::testing::raw_connect(ports_[0]);
  connection.send(post_text(std::string(kChat), chat_text(5000, true)));
  connection.read_until("data: ");
  apply({.worker = 0, .kind = FaultKind::kKill});
  EXPECT_TRUE(connection.wait_closed());
  EXPECT_FALSE(net::testing::raw_connect(ports_[0]).open());
  apply({.worker = 0, .kind = FaultKind::kRestart});
  EXPECT_EQ(post(0, chat_text(3, false)).status, 200);
  EXPECT_EQ(metric(0, "vllm:kv_cache_usage_perc"), 0);
}

TEST_F(FleetTest, KvOfAKilledPrefillWorkerIsGone) {
  start(fleet::Dialect::kKindred, {Role::kPrefill, Role::kDecode});
  const std::string body = chat_text(5, false);
  const Json reply = post(0, body, kPrefillLeg).json();
  apply({.worker = 0, .kind = FaultKind::kRestart});
  EXPECT_EQ(decode(1, body, handoff(reply, ports_[0])).json()["error"]["code"], "kv_pull_failed");
  const Json again = post(0, body, kPrefillLeg).json();
  EXPECT_EQ(decode(1, body, handoff(again, ports_[0])).status, 200);
}

TEST_F(FleetTest, AResetCutsWhatIsInFlightAndNothingElse) {
  start(fleet::Dialect::kOpenAi, {Role::kBoth}, 0.005);
  net::testing::RawConnection connection = net::testing::raw_connect(ports_[0]);
  connection.send(post_text(std::string(kChat), chat_text(5000, true)));
  std::string seen = connection.read_until("data: ");
  apply({.worker = 0, .kind = FaultKind::kReset});
  seen += connection.read_to_end();
  EXPECT_FALSE(read_reply(seen).complete);
  EXPECT_EQ(post(0, chat_text(3, false)).status, 200);
}

TEST_F(FleetTest, WrongCountsDoNotAddUpForAsLongAsTheyLast) {
  start(fleet::Dialect::kKindred, {Role::kPrefill, Role::kDecode});
  const auto counts_ok = [&] {
    const Json reply = post(0, chat_text(5, false), kPrefillLeg).json();
    return expert::counts_from_json(reply["expert_counts"].dump()).ok();
  };
  apply({.worker = 0, .kind = FaultKind::kWrongCounts, .for_s = 0.05});
  EXPECT_FALSE(counts_ok());
  std::this_thread::sleep_for(100ms);
  EXPECT_TRUE(counts_ok());
}

// As the router reads them: through an index that is looked up by a prompt's tokens.
TEST_F(FleetTest, KvEventsTellWhatIsCached) {
  kv_events_ = 0;
  start(fleet::Dialect::kVllm, {Role::kBoth, Role::kDecode});
  EXPECT_EQ(fleet_->kv_events(1), "") << "a decode worker caches no prompts";
  const std::string endpoints = fleet_->kv_events(0);
  const net::ZmqContext context;
  auto events = net::ZmqSocket::connect(context, net::ZmqKind::kSubscriber, endpoints.substr(0, endpoints.find(',')));
  auto replay = net::ZmqSocket::connect(context, net::ZmqKind::kDealer, endpoints.substr(endpoints.find(',') + 1));
  ASSERT_TRUE(events.ok() && replay.ok());
  const std::string prompt(40 * 4, 'a');  // 40 tokens: two blocks of 16, and a bit
  const std::string body = fmt::format(R"({{"prompt":"{}","max_tokens":2}})", prompt);
  const auto tokens = post(0, body, {}, "/tokenize").json()["tokens"].get<std::vector<uint32_t>>();
  EXPECT_EQ(tokens.size(), 40U);
  EXPECT_EQ(post(0, body, {}, "/v1/completions").status, 200);

  fleet::PrefixIndexOptions options;
  options.budget_bytes = 1 << 20;
  fleet::KvIndex index(options);
  EXPECT_TRUE(
      replay->send(std::array<std::string_view, 2>{std::string_view(), std::string_view("\0\0\0\0\0\0\0\0", 8)}));
  size_t replayed = 0;
  bool ended = false;
  const auto until = std::chrono::steady_clock::now() + 5s;
  while (!ended && std::chrono::steady_clock::now() < until) {
    const auto parts = replay->receive();
    if (!parts) {
      std::this_thread::sleep_for(2ms);
      continue;
    }
    ASSERT_EQ(parts->size(), 3U);
    ended = parts->at(1) == std::string(8, '\xff');
    if (ended) break;
    index.apply(1, as_bytes(parts->back()));
    ++replayed;
  }
  EXPECT_TRUE(ended);
  EXPECT_EQ(replayed, 1U);
  const auto held = index.held(tokens, {});
  ASSERT_EQ(held.size(), 1U);
  EXPECT_EQ(held[0].tokens, 32U);

  apply({.worker = 0, .kind = FaultKind::kRestart});
  bool cleared = false;
  while (!cleared && std::chrono::steady_clock::now() < until) {
    const auto parts = events->receive();
    if (parts && parts->at(2).find("AllBlocksCleared") != std::string::npos) cleared = true;
    else std::this_thread::sleep_for(2ms);
  }
  EXPECT_TRUE(cleared);
}

TEST(LiveFleetOptions, AreChecked) {
  net::testing::TestLoop loop;
  const SystemClock clock;
  const auto refuse = [&](LiveOptions options) {
    return loop.call([&] {
      auto experts = sim::make_uniform(sim::testing::small_shape(), 1);
      const auto made = LiveFleet::make(loop.executor(), std::move(options), *std::move(experts), clock);
      return made.ok() ? std::string("none") : made.error().field;
    });
  };
  EXPECT_EQ(refuse({}), "workers");
  LiveOptions options;
  options.workers.resize(2);
  options.port = 65535;
  EXPECT_EQ(refuse(options), "port");
  options.port = 0;
  options.faults = {{.worker = 2}};
  EXPECT_EQ(refuse(options), "faults[0].worker");
  options.faults = {};
  options.dialect = fleet::Dialect::kOpenAi;
  options.workers[0].role = Role::kPrefill;
  EXPECT_EQ(refuse(options), "dialect");
}

}  // namespace
}  // namespace kindred::live
