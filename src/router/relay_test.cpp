// Event streams on their way through: bytes unchanged and at once, wherever packets are cut; and what the
// client sees when the worker's stream breaks.

#include <condition_variable>
#include <optional>

#include <fmt/format.h>

#include "router/testing.h"

namespace kindred::router::testing {
namespace {

using net::testing::RawConnection;
using net::testing::RawServer;

// A plain worker made of raw sockets, so that the test says what each packet holds.
class RawUpstreamTest : public RouterTest {
 protected:
  using Script = std::function<void(RawConnection&)>;

  void serve(Script script) {
    script_ = std::move(script);
    server_.emplace([this](RawConnection& connection, int) { talk(connection); });
    options_.worker.push_back(server_->endpoint().url());
    start();
  }

  // The script's connection closes when it returns.
  void talk(RawConnection& connection) {
    for (;;) {
      const std::string request = connection.read_message();
      if (request.empty()) return;
      if (request.starts_with("GET /health")) {
        connection.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}");
      } else if (request.starts_with("GET ")) {
        const std::string models = R"({"object":"list","data":[{"id":"m","object":"model"}]})";
        connection.send("HTTP/1.1 200 OK\r\nContent-Length: " + std::to_string(models.size()) + "\r\n\r\n" + models);
      } else {
        return script_(connection);
      }
    }
  }

  // Lets the script go on once the client has what was sent.
  void let_go() {
    const std::lock_guard lock(mutex_);
    ++released_;
    changed_.notify_all();
  }
  void wait_for(int count) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, 5s, [&] { return released_ >= count; });
  }

  void TearDown() override {
    RouterTest::TearDown();
    server_.reset();
  }

  Script script_;
  std::optional<RawServer> server_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int released_ = 0;
};

constexpr const char* kStreamHead =
    "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";

std::string chunk(std::string_view payload) { return fmt::format("{:x}\r\n{}\r\n", payload.size(), payload); }

std::string token(std::string_view text) {
  return fmt::format("data: {{\"choices\":[{{\"delta\":{{\"content\":\"{}\"}}}}]}}\n\n", text);
}

// Two events in chunks whose borders are not theirs, with `[DONE]` as content, and the end.
std::string sample_wire() {
  const std::string text = token("a data: [DONE]\\n\\n b") + token("c") + "data: [DONE]\n\n";
  return chunk(text.substr(0, 21)) + chunk(text.substr(21, 60)) + chunk(text.substr(81)) + "0\r\n\r\n";
}

std::string sample_body() { return token("a data: [DONE]\\n\\n b") + token("c") + "data: [DONE]\n\n"; }

TEST_F(RawUpstreamTest, RelaySplitsEverywherePassAtOnceAndUnchanged) {
  const std::string wire = sample_wire();
  std::atomic<size_t> split{0};
  serve([this, wire, &split](RawConnection& connection) {
    connection.send(kStreamHead + wire.substr(0, split));
    wait_for(static_cast<int>(split));
    connection.send(wire.substr(split));
    connection.read_until("\r\n\r\n");  // until the router has closed
  });
  for (size_t at = 1; at < wire.size(); ++at) {
    split = at;
    auto client = open("POST", "/v1/chat/completions", chat_body(true));
    std::string seen = client->read_head();
    const std::string first = client->read_bytes(at);  // while the worker holds back the rest
    ASSERT_EQ(first, wire.substr(0, at)) << "at " << at;
    let_go();
    const Answer answer = parse_answer(seen + first + client->read_to_end());
    ASSERT_TRUE(answer.complete) << "at " << at;
    ASSERT_EQ(answer.body, sample_body()) << "at " << at;
  }
}

TEST_F(RawUpstreamTest, RelayPassesByteByByte) {
  const std::string wire = sample_wire();
  serve([this, wire](RawConnection& connection) {
    connection.send(kStreamHead);
    for (size_t at = 0; at < wire.size(); ++at) {
      connection.send(wire.substr(at, 1));
      wait_for(static_cast<int>(at + 1));
    }
    connection.read_until("\r\n\r\n");
  });
  auto client = open("POST", "/v1/chat/completions", chat_body(true));
  client->read_head();
  for (size_t at = 0; at < wire.size(); ++at) {
    ASSERT_EQ(client->read_bytes(1), wire.substr(at, 1)) << "at " << at;
    let_go();
  }
  EXPECT_TRUE(eventually([&] { return has_metric("kindred_router_requests_total{outcome=\"ok\",status=\"200\"} 1"); }));
}

// Each: what the worker sends before it resets the connection, and what must follow at the client.
struct BreakCase {
  const char* name;
  std::string sent;     // with chunk framing
  std::string payload;  // what the client has of it, decoded
  bool error_event;     // follows, well-formed
};

TEST_F(RawUpstreamTest, ABrokenStreamNeverLooksWhole) {
  const std::string half = R"(data: {"choices":[{"delta":{"content":"hal)";
  const std::vector<BreakCase> cases = {
      {"between events", chunk(token("a")), token("a"), true},
      {"inside an event, between chunks", chunk(token("a") + half), token("a") + half, true},
      {"inside an event and a chunk", "100\r\n" + token("a") + half, token("a") + half, true},
      {"one byte of a chunk missing", "3c\r\n" + std::string(59, ':'), std::string(59, ':'), true},
      {"behind a chunk's payload", chunk(token("a")).substr(0, 2 + 2 + token("a").size()), token("a"), true},
      {"behind a chunk's CR", chunk(token("a")).substr(0, 2 + 2 + token("a").size() + 1), token("a"), true},
      {"whole event without its empty line", chunk("data: {\"x\":1}\n"), "data: {\"x\":1}\n", true},
      {"inside a size line", chunk(token("a")) + "1", token("a"), false},
      {"inside an absurd chunk", "ffffffff\r\n" + token("a"), token("a"), false},
      {"[DONE] without its empty line", chunk(token("a") + "data: [DONE]"), token("a") + "data: [DONE]", false},
      {"[DONE] cut short", chunk(token("a") + "data: [DO"), token("a") + "data: [DO", false},
  };
  std::atomic<size_t> which{0};
  options_.failures_until_out = 1000;
  serve([&](RawConnection& connection) {
    connection.send(kStreamHead + cases[which].sent);
    wait_for(static_cast<int>(which + 1));
    connection.reset();
  });
  for (size_t i = 0; i < cases.size(); ++i) {
    const BreakCase& c = cases[i];
    which = i;
    auto client = open("POST", "/v1/chat/completions", chat_body(true));
    const std::string head = client->read_head();
    const std::string first = client->read_bytes(c.sent.size());
    let_go();
    const Answer answer = parse_answer(head + first + client->read_to_end());
    EXPECT_FALSE(answer.complete) << c.name;
    ASSERT_TRUE(answer.body.starts_with(c.payload)) << c.name << ": " << answer.body;
    const std::string rest = answer.body.substr(c.payload.size());
    EXPECT_EQ(rest.find("[DONE]"), std::string::npos) << c.name;
    if (!c.error_event) {
      EXPECT_EQ(rest, "") << c.name;
      continue;
    }
    // An event of its own: behind an empty line, and ended by one.
    const size_t at = rest.find("data: {\"error\":{");
    ASSERT_NE(at, std::string::npos) << c.name << ": " << answer.body;
    EXPECT_EQ(rest.find_first_not_of('\n'), at) << c.name;
    EXPECT_TRUE((c.payload + rest.substr(0, at)).ends_with("\n\n") || c.payload.starts_with(':')) << c.name;
    EXPECT_TRUE(rest.ends_with("\n\n")) << c.name;
  }
  EXPECT_TRUE(eventually([&] { return in_flight() == 0; }));
}

// What a client sees of an event: the last name that was given, and its data.
struct SeenEvent {
  std::string name, data;
};

std::vector<SeenEvent> events_of(std::string_view body) {
  std::vector<SeenEvent> out;
  SeenEvent event;
  bool begun = false;
  while (!body.empty()) {
    const size_t end = body.find('\n');
    if (end == std::string_view::npos) break;
    const std::string_view line = body.substr(0, end);
    body.remove_prefix(end + 1);
    if (line.empty()) {
      if (begun) out.push_back(std::exchange(event, {}));
      begun = false;
    } else if (line.starts_with("event: ")) {
      event.name = line.substr(7);
      begun = true;
    } else if (line.starts_with("data: ")) {
      event.data += line.substr(6);
      begun = true;
    }
  }
  return out;
}

TEST_F(RawUpstreamTest, ABrokenStreamOfNamedEventsEndsInItsError) {
  const std::string delta = "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"delta\":{}}\n\n";
  const std::string stop = "event: message_stop\ndata: {\"type\":\"message_stop\"}\n";
  const std::vector<std::string> cases = {
      chunk(delta),
      chunk(delta + delta.substr(0, 15)),
      chunk(delta + delta.substr(0, 27)),  // behind the name's line
      chunk(delta + delta.substr(0, 50)),
      chunk(delta + stop),
      chunk(delta + stop.substr(0, stop.size() - 1)),
      "c8\r\n" + delta + delta.substr(0, 50),
      "c8\r\n" + delta,
      fmt::format("{:x}\r\n", 2 * delta.size()) + delta + delta.substr(0, delta.size() - 1),
      fmt::format("{:x}\r\n", delta.size() + stop.size() + 1) + delta + stop,
      fmt::format("{:x}\r\n", delta.size() + stop.size()) + delta + stop.substr(0, stop.size() - 1),
  };
  std::atomic<size_t> which{0};
  options_.failures_until_out = 1000;
  serve([&](RawConnection& connection) {
    connection.send(kStreamHead + cases[which]);
    wait_for(static_cast<int>(which + 1));
    connection.reset();
  });
  for (size_t i = 0; i < cases.size(); ++i) {
    which = i;
    auto client = open("POST", "/v1/messages", chat_body(true));
    const std::string head = client->read_head();
    const std::string first = client->read_bytes(cases[i].size());
    let_go();
    const Answer answer = parse_answer(head + first + client->read_to_end());
    EXPECT_FALSE(answer.complete) << i;
    const std::vector<SeenEvent> seen = events_of(answer.body);
    ASSERT_EQ(seen.size(), 2U) << i << ": " << answer.body;
    EXPECT_EQ(seen[0].name, "content_block_delta") << i;
    EXPECT_EQ(seen[1].name, "error") << i << ": " << answer.body;
    EXPECT_TRUE(seen[1].data.ends_with("}}")) << i;
    EXPECT_NE(seen[1].data.find(R"({"type":"error","error":{)"), std::string::npos) << i << ": " << answer.body;
  }
}

TEST_F(RawUpstreamTest, NamedStreamsThatEndWithTheirConnectionNeedTheirLastEvent) {
  const std::vector<std::pair<const char*, std::string>> cases = {
      {"/v1/messages", "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n"},
      {"/v1/responses", "event: response.completed\ndata: {\"type\":\"response.completed\"}\n\n"}};
  std::atomic<size_t> which{0};
  std::atomic<bool> done{false};
  const std::string begun = "event: x\ndata: {}\n\n";
  serve([&](RawConnection& connection) {
    connection.send("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n" + begun);
    if (done) connection.send(cases[which].second);
  });
  for (const auto& [path, last] : cases) {
    done = false;
    const Answer cut = call("POST", path, chat_body(true));
    EXPECT_FALSE(cut.complete) << path;
    EXPECT_EQ(events_of(cut.body).back().name, "error") << cut.body;
    done = true;
    const Answer whole = call("POST", path, chat_body(true));
    EXPECT_TRUE(whole.complete) << path;
    EXPECT_EQ(whole.body, begun + last);
    ++which;
  }
}

TEST_F(RawUpstreamTest, AStreamThatEndsWithItsConnectionNeedsItsDone) {
  std::atomic<bool> done{false};
  serve([&](RawConnection& connection) {
    connection.send("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n" + token("a"));
    if (done) connection.send("data: [DONE]\n\n");
  });
  const Answer cut = chat(true);
  EXPECT_FALSE(cut.complete);
  EXPECT_NE(cut.body.find("data: {\"error\":{"), std::string::npos) << cut.body;
  done = true;
  const Answer whole = chat(true);
  EXPECT_TRUE(whole.complete);
  EXPECT_EQ(whole.body, token("a") + "data: [DONE]\n\n");
}

TEST_F(RawUpstreamTest, TpotCountsTokensNotEvents) {
  serve([&](RawConnection& connection) {
    const std::string role = "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n";
    connection.send(kStreamHead + chunk(role) + chunk(token("a")));
    wait_for(1);
    std::this_thread::sleep_for(20ms);  // what is measured: at least this, over one token
    const std::string usage = "data: {\"choices\":[],\"usage\":{\"completion_tokens\":2}}\n\n";
    connection.send(chunk(token("b")) + chunk(usage) + chunk("data: [DONE]\n\n") + "0\r\n\r\n");
    connection.read_until("\r\n\r\n");
  });
  auto client = open("POST", "/v1/chat/completions", chat_body(true));
  client->read_until("\"a\"");
  let_go();
  client->read_to_end();
  const auto sum = [&] {
    const std::string text = metrics();
    const std::string name = "kindred_router_tpot_seconds_sum ";
    const size_t at = text.find(name);
    return at == std::string::npos ? 0.0 : std::stod(text.substr(at + name.size()));
  };
  EXPECT_TRUE(eventually([&] { return has_metric("kindred_router_tpot_seconds_count 1"); }));
  EXPECT_GE(sum(), 0.020);
}

}  // namespace
}  // namespace kindred::router::testing
