// Who may call, how much, what workers see of it, and what is written down.
#include <fcntl.h>
#include <unistd.h>

#include "base/config.h"
#include "base/json.h"
#include "router/access_log.h"
#include "router/edge.h"
#include "router/headers.h"
#include "router/testing.h"

namespace kindred::router::testing {
namespace {

constexpr const char* kAlice = "Authorization: Bearer alices-own-key\r\n";

class AccessTest : public RouterTest {
 protected:
  Answer chat_as(const std::string& headers, bool stream = false, const std::string& more = {}) {
    return call("POST", "/v1/chat/completions", chat_body(stream, more), headers);
  }
  static std::string temp(const std::string& name) {
    return ::testing::TempDir() + "kindred_" + name + "_" +
           ::testing::UnitTest::GetInstance()->current_test_info()->name();
  }
  static std::string code_of(const Answer& answer) {
    const Json root = parse_json(answer.body);
    return root.is_object() ? root["error"].value("code", "") : "";
  }
};

TEST_F(AccessTest, OnlyKeysThatAreKnownGetIn) {
  options_.edge.api_keys = "alice:alices-own-key\nbob:bobs-own-key\n";
  FakeWorker& w = add(Role::kBoth, "");
  start();
  for (const char* headers : {"", "Authorization: Bearer alices-own-kez\r\n", "Authorization: Basic alices-own-key\r\n",
                              "x-api-key: nobodys-key\r\n", "Authorization: alices-own-key\r\n"}) {
    const Answer answer = chat_as(headers);
    EXPECT_EQ(answer.status, 401) << headers;
    EXPECT_EQ(code_of(answer), "invalid_api_key") << headers;
    EXPECT_EQ(*answer.headers.find("WWW-Authenticate"), "Bearer");
    EXPECT_EQ(answer.body.find("key-"), std::string::npos);
  }
  EXPECT_EQ(chat_as("Authorization: Bearer alices-own-key\r\nAuthorization: Bearer bobs-own-key\r\n").status, 400);
  EXPECT_EQ(w.leg_count(), 0U);
  EXPECT_EQ(chat_as(kAlice).status, 200);
  EXPECT_EQ(chat_as("X-Api-Key: bobs-own-key\r\n").status, 200);
  EXPECT_EQ(call("GET", "/v1/models").status, 401);
  EXPECT_EQ(call("GET", "/v1/models", "", kAlice).status, 200);
  EXPECT_EQ(call("GET", "/health").status, 200);
  EXPECT_EQ(call("GET", "/ready").status, 200);
}

TEST_F(AccessTest, KeysAreReadAgain) {
  const std::string path = temp("keys");
  ASSERT_TRUE(write_file(path, "alice:alices-own-key\n").ok());
  options_.edge.api_keys_file = path;
  add(Role::kBoth, "");
  start();
  EXPECT_EQ(chat_as(kAlice).status, 200);
  ASSERT_TRUE(write_file(path, "alice:alices-new-key\n").ok());
  EXPECT_EQ(chat_as(kAlice).status, 200);
  EXPECT_TRUE(router_->core().edge->reload().ok());
  EXPECT_EQ(chat_as(kAlice).status, 401);
  EXPECT_EQ(chat_as("Authorization: Bearer alices-new-key\r\n").status, 200);
  std::remove(path.c_str());
}

TEST_F(AccessTest, OperatorsPathsHaveAKeyOfTheirOwn) {
  options_.edge.api_keys = "alice:alices-own-key";
  add(Role::kBoth, "");
  start();
  const Answer open = call("GET", "/metrics", "", kAlice);
  EXPECT_EQ(open.status, 403);
  EXPECT_EQ(code_of(open), "admin_off");
}

TEST_F(AccessTest, TheAdminKeyOpensThem) {
  options_.edge.admin_key = "the-operators-key";
  add(Role::kBoth, "");
  start();
  EXPECT_EQ(call("GET", "/metrics").status, 401);
  EXPECT_EQ(call("GET", "/status", "", kAlice).status, 401);
  EXPECT_EQ(call("DELETE", "/workers?url=x").status, 401);
  EXPECT_EQ(call("GET", "/status", "", "Authorization: Bearer the-operators-key\r\n").status, 200);
  EXPECT_EQ(call("GET", "/v1/models").status, 200);
  EXPECT_EQ(chat(false).status, 200);  // clients have none here
}

TEST_F(AccessTest, RequestsOverAKeysLimitAre429WithTheHeadersOfIt) {
  options_.edge.api_keys = "alice:alices-own-key rpm=2\nbob:bobs-own-key";
  FakeWorker& w = add(Role::kBoth, "");
  start();
  const Answer first = chat_as(kAlice);
  EXPECT_EQ(first.status, 200);
  EXPECT_EQ(*first.headers.find("x-ratelimit-limit-requests"), "2");
  EXPECT_EQ(*first.headers.find("x-ratelimit-remaining-requests"), "1");
  const Answer second = chat_as(kAlice, /*stream=*/true);
  EXPECT_EQ(*second.headers.find("x-ratelimit-remaining-requests"), "0");
  const Answer third = chat_as(kAlice);
  EXPECT_EQ(third.status, 429);
  EXPECT_EQ(code_of(third), "rate_limit_exceeded");
  EXPECT_GE(std::stoi(std::string(*third.headers.find("Retry-After"))), 1);
  EXPECT_EQ(*third.headers.find("x-ratelimit-remaining-requests"), "0");
  EXPECT_EQ(w.leg_count(), 2U);
  EXPECT_EQ(chat_as("Authorization: Bearer bobs-own-key\r\n").status, 200);
}

TEST_F(AccessTest, TokensAreChargedAsUsedAndNotWhenNobodyServed) {
  options_.edge.api_keys = "alice:alices-own-key tpm=1000";
  FakeWorker& w = add(Role::kBoth, "");
  start();
  w.play(refuse(400, "bad"));
  EXPECT_EQ(chat_as(kAlice).status, 400);
  w.play([](const SeenLeg&, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
    co_await writer.send(200, json_type(), R"({"usage":{"prompt_tokens":100,"completion_tokens":500}})");
  });
  const Answer first = chat_as(kAlice);
  EXPECT_GE(std::stoi(std::string(*first.headers.find("x-ratelimit-remaining-tokens"))),
            950);  // the estimate of a short prompt
  const Answer second = chat_as(kAlice);
  EXPECT_EQ(second.status, 200);
  EXPECT_LE(std::stoi(std::string(*second.headers.find("x-ratelimit-remaining-tokens"))), 400);
  const Answer third = chat_as(kAlice);  // a hundred in debt
  EXPECT_EQ(third.status, 429);
  EXPECT_NE(third.body.find("tokens"), std::string::npos);
}

TEST_F(AccessTest, StreamedTokensAreCountedToo) {
  options_.edge.api_keys = "alice:alices-own-key tpm=1000";
  FakeWorker& w = add(Role::kBoth, "");
  w.play([](const SeenLeg&, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
    co_await writer.start(200, events_type());
    co_await writer.write("data: {\"choices\":[]}\n\n");
    co_await writer.write("data: {\"usage\":{\"prompt_tokens\":10,\"completion_tokens\":2000}}\n\ndata: [DONE]\n\n");
    co_await writer.finish();
  });
  start();
  EXPECT_EQ(chat_as(kAlice, /*stream=*/true).status, 200);
  EXPECT_TRUE(eventually([&] { return chat_as(kAlice).status == 429; }));
}

// ---- What a worker sees of a client's headers.

TEST_F(AccessTest, HeadersOfTheHopStayAndTheOthersCross) {
  FakeWorker& w = add(Role::kBoth, "");
  start();
  const Answer answer = call("POST", "/v1/chat/completions", chat_body(false),
                             "X-Custom: 7\r\nx-vendor-trace: 8\r\nbaggage: k=v\r\nConnection: X-Named, close\r\n"
                             "X-Named: secret\r\nKeep-Alive: timeout=5\r\nTE: trailers\r\nUpgrade: h2c\r\n"
                             "Proxy-Authorization: Basic x\r\nAuthorization: Bearer of-the-client\r\n"
                             "X-Request-Id: mine-1\r\n");
  EXPECT_EQ(answer.status, 200);
  EXPECT_EQ(*answer.headers.find("X-Request-Id"), "mine-1");
  ASSERT_EQ(w.leg_count(), 1U);
  const net::Headers seen = w.legs()[0].headers;
  EXPECT_EQ(*seen.find("X-Custom"), "7");
  EXPECT_EQ(*seen.find("x-vendor-trace"), "8");
  EXPECT_EQ(*seen.find("baggage"), "k=v");
  EXPECT_EQ(*seen.find("X-Request-Id"), "mine-1");
  EXPECT_EQ(seen.count("X-Request-Id"), 1U);
  EXPECT_EQ(*seen.find("Authorization"), "Bearer of-the-client");  // the router has no keys: it is for the worker
  EXPECT_EQ(seen.count("Authorization"), 1U);
  EXPECT_EQ(seen.count("Host"), 1U);
  EXPECT_EQ(seen.count("Content-Length"), 1U);
  for (const char* name : {"X-Named", "Keep-Alive", "TE", "Upgrade", "Proxy-Authorization", "Transfer-Encoding"}) {
    EXPECT_EQ(seen.find(name), nullptr) << name;
  }
}

TEST_F(AccessTest, HeadersOfTheHopStayThoughNoConnectionNamesAny) {
  net::Headers from_client;
  for (const char* name : {"X-Named", "Keep-Alive", "TE", "Upgrade", "Proxy-Authorization", "Transfer-Encoding"}) {
    from_client.add(name, "9");
  }
  const net::Headers sent = to_worker(from_client, "id");
  ASSERT_EQ(sent.size(), 2U);
  EXPECT_EQ(*sent.find("X-Named"), "9");
  EXPECT_EQ(*sent.find("X-Request-Id"), "id");
}

TEST_F(AccessTest, ClientsKeysOfTheRouterEndThere) {
  options_.edge.api_keys = "alice:alices-own-key";
  FakeWorker& w = add(Role::kBoth, "");
  start();
  EXPECT_EQ(chat_as(kAlice).status, 200);
  EXPECT_EQ(chat_as("x-api-key: alices-own-key\r\n").status, 200);
  ASSERT_EQ(w.leg_count(), 2U);
  for (const SeenLeg& leg : w.legs()) {
    EXPECT_EQ(leg.headers.find("Authorization"), nullptr);
    EXPECT_EQ(leg.headers.find("x-api-key"), nullptr);
  }
}

TEST_F(AccessTest, WorkersGetTheirOwnKeyExactlyOnce) {
  options_.edge.upstream.authorization = "Bearer the-workers-key";
  FakeWorker& p = add(Role::kPrefill);
  FakeWorker& d = add(Role::kDecode);
  start();
  EXPECT_EQ(chat_as("Authorization: Bearer of-the-client\r\nx-api-key: of-the-client\r\n").status, 200);
  ASSERT_EQ(p.leg_count(), 1U);
  ASSERT_EQ(d.leg_count(), 1U);
  for (const SeenLeg& leg : {p.legs()[0], d.legs()[0]}) {
    EXPECT_EQ(leg.headers.count("Authorization"), 1U);
    EXPECT_EQ(*leg.headers.find("Authorization"), "Bearer the-workers-key");
    EXPECT_EQ(leg.headers.find("x-api-key"), nullptr);
  }
}

TEST_F(AccessTest, TraceContextIsContinuedOrBegun) {
  FakeWorker& w = add(Role::kBoth, "");
  start();
  const std::string parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
  chat_as("traceparent: " + parent + "\r\ntracestate: vendor=1\r\n");
  chat_as("traceparent: nonsense\r\ntracestate: vendor=1\r\n");
  ASSERT_EQ(w.leg_count(), 2U);
  EXPECT_EQ(*w.legs()[0].headers.find("traceparent"), parent);
  EXPECT_EQ(*w.legs()[0].headers.find("tracestate"), "vendor=1");
  EXPECT_EQ(w.legs()[1].headers.count("traceparent"), 1U);
  EXPECT_TRUE(parse_traceparent(w.legs()[1].headers));
  EXPECT_EQ(w.legs()[1].headers.find("tracestate"), nullptr);
}

// ---- The access log.

TEST(AccessLine, SaysTheSameInBothForms) {
  AccessRecord record;
  record.unix_ms = 1'700'000'000'123;
  record.id = "r 1";
  record.method = "POST";
  record.path = "/v1/x";
  record.status = 200;
  record.outcome = "ok";
  record.bytes_out = 7;
  record.duration_ms = 1.5;
  record.output_tokens = 3;
  EXPECT_EQ(access_line(record, AccessLogFormat::kText),
            "time=2023-11-14T22:13:20.123Z id=\"r 1\" method=POST path=/v1/x status=200 outcome=ok bytes_in=0 "
            "bytes_out=7 duration_ms=1.500 output_tokens=3\n");
  const Json json = parse_json(access_line(record, AccessLogFormat::kJson));
  ASSERT_TRUE(json.is_object());
  EXPECT_EQ(json["id"], "r 1");
  EXPECT_EQ(json["bytes_out"], 7);
  EXPECT_EQ(json["duration_ms"], 1.5);
  EXPECT_FALSE(json.contains("ttft_ms"));
  const std::string evil = "a\nb\" c\xff";
  record.id = evil;
  for (const auto format : {AccessLogFormat::kText, AccessLogFormat::kJson}) {
    const std::string line = access_line(record, format);
    EXPECT_EQ(line.find('\n'), line.size() - 1);
  }
}

TEST_F(AccessTest, ALineTellsWhoServedAndHowMuch) {
  options_.edge.api_keys = "alice:alices-own-key";
  options_.edge.access_log = AccessLogFormat::kJson;
  options_.edge.access_log_file = temp("log");
  FakeWorker& p = add(Role::kPrefill);
  FakeWorker& d = add(Role::kDecode);
  start(/*wait_until_ready=*/true);
  EXPECT_TRUE(chat_as(std::string(kAlice) + "X-Request-Id: the-one\r\n", /*stream=*/true).complete);
  std::string line;
  ASSERT_TRUE(eventually([&] {
    const std::string all = read_file(options_.edge.access_log_file).value();
    const size_t at = all.find("\"id\":\"the-one\"");
    if (at == std::string::npos) return false;
    line = all.substr(all.rfind('\n', at) + 1);
    return true;
  }));
  const Json record = parse_json(line.substr(0, line.find('\n')));
  ASSERT_TRUE(record.is_object()) << line;
  EXPECT_EQ(record["key"], "alice");
  EXPECT_EQ(record["method"], "POST");
  EXPECT_EQ(record["path"], "/v1/chat/completions");
  EXPECT_EQ(record["status"], 200);
  EXPECT_EQ(record["outcome"], "ok");
  EXPECT_EQ(record["model"], "m");
  EXPECT_EQ(record["prefill_worker"], p.url());
  EXPECT_EQ(record["decode_worker"], d.url());
  EXPECT_EQ(record["prompt_tokens"], 10);
  EXPECT_GT(record["output_tokens"], 0);
  EXPECT_EQ(record["bytes_in"], chat_body(true).size());
  EXPECT_GT(record["bytes_out"], std::string(kWholeStream).size());
  EXPECT_GT(record["ttft_ms"], 0.0);
  EXPECT_FALSE(record["reason"].get<std::string>().empty());
  std::remove(options_.edge.access_log_file.c_str());
}

TEST_F(AccessTest, LinesThatAreLostAreCounted) {
  options_.edge.access_log = AccessLogFormat::kText;
  options_.edge.access_log_file = "/dev/full";
  add(Role::kBoth, "");
  start();
  EXPECT_EQ(chat(false).status, 200);
  // The line is written behind the answer.
  EXPECT_TRUE(eventually([&] {
    const std::string all = metrics();
    const std::string_view name = "\nkindred_router_access_lines_lost_total ";
    const size_t at = all.find(name);
    return at != std::string::npos && all[at + name.size()] != '0';
  }));
}

// Standard error, caught in a file while it lives.
class CaughtStderr {
 public:
  explicit CaughtStderr(std::string path) : path_(std::move(path)), kept_(::dup(STDERR_FILENO)) {
    const int fd = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND, 0600);
    ::dup2(fd, STDERR_FILENO);
    ::close(fd);
  }
  ~CaughtStderr() {
    ::dup2(kept_, STDERR_FILENO);
    ::close(kept_);
    std::remove(path_.c_str());
  }
  CaughtStderr(const CaughtStderr&) = delete;
  CaughtStderr& operator=(const CaughtStderr&) = delete;
  std::string text() const { return read_file(path_).value(); }

 private:
  std::string path_;
  int kept_;
};

class CanaryTest : public AccessTest {
 protected:
  // One way through the router after the other, each with canaries in all that must not be written down.
  void walk(FakeWorker& p, FakeWorker& d, FakeWorker& w) {
    const std::string key = "Authorization: Bearer canary-key-good\r\n";
    for (const bool stream : {false, true}) {
      EXPECT_EQ(chat_as(key, stream).status, 200);
      EXPECT_EQ(chat_as("Authorization: Bearer canary-key-bad\r\n", stream).status, 401);
    }
    for (const char* body :
         {R"({"model":"canary-model","messages":[{"role":"user","content":"canary-prompt"}]})", "{canary-broken",
          R"({"messages":"canary-wrong-type"})", R"({"model":"m","messages":[],"bootstrap_canary":1})"}) {
      EXPECT_GE(call("POST", "/v1/chat/completions", body, key).status, 400);
    }
    EXPECT_EQ(
        call("POST", "/v1/completions?prompt=canary-query", R"({"model":"m","prompt":"canary-prompt"})", key).status,
        200);
    const auto with_error = [](int status) {
      return [status](const SeenLeg&, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
        const std::string body =
            R"({"error":{"message":"canary-message","type":"canary-type","code":"canary-code","param":"canary-param"}})";
        co_await writer.send(status, json_type(), body);
      };
    };
    const Script garbage = [](const SeenLeg&, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
      net::Headers headers;
      headers.add("Content-Type", "application/vnd.kindred.prefill+json");
      co_await writer.send(200, std::move(headers), R"({"canary-field":"canary-value)");
    };
    const Script cut = [](const SeenLeg&, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
      co_await writer.start(200, events_type());
      co_await writer.write("data: {\"choices\":[{\"delta\":{\"content\":\"canary-output\"}}]}\n\ndata: {\"canary-ha");
      co_await pause_for(10ms);
      writer.abort();
    };
    const Script lie = [](const SeenLeg&, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
      net::Headers headers = json_type();
      headers.add("X-Output", "canary-header");
      co_await writer.send(200, std::move(headers), R"({"text":"canary-output","usage":{"prompt_tokens":"canary"}})");
    };
    for (FakeWorker* worker : {&p, &d, &w}) {
      for (const Script& script : {Script(with_error(400)), Script(with_error(500)), Script(with_error(503)), garbage,
                                   cut, lie, Script(hang_up)}) {
        worker->play(script);
        for (const bool stream : {false, true}) chat_as(key, stream);
      }
      worker->play({});
    }
  }
};

TEST_F(CanaryTest, NothingOfPromptOutputOrKeysIsWrittenAnywhere) {
  const CaughtStderr caught(temp("stderr"));
  options_.edge.api_keys = "alice:canary-key-good";
  options_.edge.admin_key = "canary-admin-key";
  options_.edge.access_log = AccessLogFormat::kText;  // to standard error, among the log
  options_.edge.upstream.authorization = "Bearer canary-upstream-key";
  FakeWorker& p = add(Role::kPrefill);
  FakeWorker& d = add(Role::kDecode);
  FakeWorker& w = add(Role::kBoth, "");
  w.model = "plain";
  start();
  walk(p, d, w);
  const std::string admin = "Authorization: Bearer canary-admin-key\r\n";
  const std::string metrics = call("GET", "/metrics", "", admin).body;
  const std::string status = call("GET", "/status?decisions=1000", "", admin).body;
  EXPECT_NE(metrics.find("kindred_router_requests_total"), std::string::npos);
  EXPECT_NE(status.find("\"decisions_total\""), std::string::npos);
  EXPECT_EQ(metrics.find("canary"), std::string::npos) << metrics;
  EXPECT_EQ(status.find("canary"), std::string::npos) << status;
  const std::string written = caught.text();
  EXPECT_NE(written.find("path=/v1/chat/completions"), std::string::npos);
  EXPECT_NE(written.find("key=alice"), std::string::npos);
  for (size_t at = written.find("canary"); at != std::string::npos; at = written.find("canary", at + 1)) {
    const size_t line = written.rfind('\n', at) + 1;
    ADD_FAILURE() << written.substr(line, written.find('\n', at) - line);
  }
}

}  // namespace
}  // namespace kindred::router::testing
