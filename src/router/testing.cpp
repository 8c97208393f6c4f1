#include "router/testing.h"

#include <fmt/format.h>

#include <boost/asio/this_coro.hpp>
#include <fstream>
#include <thread>

#include "base/bytes.h"
#include "base/config.h"
#include "base/json.h"
#include "net/chunked.h"

namespace kindred::router::testing {
namespace {

std::string header_or_empty(const net::Headers& headers, std::string_view name) {
  const std::string_view* found = headers.find(name);
  return found == nullptr ? std::string() : std::string(*found);
}

bool wants_stream(const std::string& body) { return body.find("\"stream\":true") != std::string::npos; }

net::Headers content_type(std::string_view type) {
  net::Headers headers;
  headers.add("Content-Type", type);
  return headers;
}

std::string event(std::string_view text) {
  return fmt::format("data: {{\"id\":\"c1\",\"choices\":[{{\"index\":0,\"delta\":{{\"content\":{}}}}}]}}\n\n",
                     json_string(text));
}

}  // namespace

bool eventually(const std::function<bool()>& holds, std::chrono::milliseconds within) {
  const auto until = std::chrono::steady_clock::now() + within;
  while (std::chrono::steady_clock::now() < until) {
    if (holds()) return true;
    std::this_thread::sleep_for(5ms);
  }
  return holds();
}

net::Task<void> pause_for(std::chrono::milliseconds time) {
  const auto executor = co_await net::asio::this_coro::executor;
  net::asio::steady_timer timer(executor, time);
  co_await timer.async_wait(net::kNoThrow);
}

net::Task<void> Gate::wait() {
  const auto until = std::chrono::steady_clock::now() + 10s;
  // Hundreds wait at once in some tests, and sanitizers make each look dear.
  while (!open_ && std::chrono::steady_clock::now() < until) co_await pause_for(10ms);
}

net::Headers json_type() { return content_type("application/json"); }
net::Headers events_type() { return content_type("text/event-stream"); }

Script refuse(int status, std::string code) {
  return [status, code](const SeenLeg&, net::Request&, net::ResponseWriter& writer) -> net::Task<void> {
    const std::string body = Json{{"error", {{"message", "scripted"}, {"code", code}}}}.dump();
    co_await writer.send(status, json_type(), body);
  };
}

net::Task<void> hang_up(const SeenLeg&, net::Request&, net::ResponseWriter& writer) {
  writer.abort();
  co_return;
}

net::Task<void> hang(const SeenLeg&, net::Request& request, net::ResponseWriter&) {
  const auto until = std::chrono::steady_clock::now() + 10s;
  while (!request.cancel.cancelled() && std::chrono::steady_clock::now() < until) co_await pause_for(5ms);
}

FakeWorker::FakeWorker(net::testing::TestLoop& loop, Role role, std::string fingerprint,
                       std::shared_ptr<net::TlsServer> tls)
    : loop_(loop), role_(role), fingerprint_(std::move(fingerprint)), tls_(std::move(tls)), counts_(counts_on(0)) {
  revive();
}

void FakeWorker::revive() {
  loop_.call([this] {
    net::ServerOptions options;
    options.tls = tls_;
    server_ = std::make_unique<net::HttpServer>(
        loop_.executor(), options,
        [this](net::Request& request, net::ResponseWriter& writer) { return handle(request, writer); });
    const Result<uint16_t> port = server_->listen("127.0.0.1", port_);
    EXPECT_TRUE(port.ok());
    if (port) port_ = *port;
    return 0;
  });
}

void FakeWorker::kill() {
  if (!server_) return;
  loop_.run([this]() -> net::Task<void> {
    server_->stop();
    co_await server_->drain(0ms);
  });
  loop_.call([this] {
    server_.reset();
    return 0;
  });
}

void FakeWorker::play(Script script) {
  const std::lock_guard lock(mutex_);
  script_ = std::move(script);
}

void FakeWorker::set_page(std::string path, std::string body) {
  const std::lock_guard lock(mutex_);
  pages_[std::move(path)] = std::move(body);
}

void FakeWorker::remove_page(const std::string& path) {
  const std::lock_guard lock(mutex_);
  pages_.erase(path);
}

void FakeWorker::set_counts(std::string json) {
  const std::lock_guard lock(mutex_);
  counts_ = std::move(json);
}

std::vector<SeenLeg> FakeWorker::legs() const {
  const std::lock_guard lock(mutex_);
  return legs_;
}

std::vector<std::string> FakeWorker::released() const {
  const std::lock_guard lock(mutex_);
  return released_;
}

std::vector<std::string> FakeWorker::renewed() const {
  const std::lock_guard lock(mutex_);
  return renewed_;
}

std::string FakeWorker::models_json() const {
  Json entry = {{"id", model}, {"object", "model"}, {"created", 0}, {"owned_by", "kindred"}};
  if (!fingerprint_.empty()) {
    entry["kindred"] = {{"v", 1},
                        {"role", to_string(role_)},
                        {"fingerprint", fingerprint_},
                        {"layers", test_shape().layers},
                        {"experts", test_shape().experts},
                        {"top_k", test_shape().top_k}};
  }
  return Json{{"object", "list"}, {"data", {entry}}}.dump();
}

net::Task<void> FakeWorker::handle(net::Request& request, net::ResponseWriter& writer) {
  const std::string path(request.head.path());
  if (path == "/health") {
    co_await writer.send(health_status_, json_type(), R"({"status":"draining"})");
    co_return;
  }
  if (path == "/v1/models") {
    std::string body = models_json();
    {
      const std::lock_guard lock(mutex_);
      if (const auto found = pages_.find(path); found != pages_.end()) body = found->second;
    }
    co_await writer.send(200, json_type(), body);
    co_return;
  }
  if (request.head.method == "GET") {
    std::optional<std::string> page;
    {
      const std::lock_guard lock(mutex_);
      if (const auto found = pages_.find(path); found != pages_.end()) page = found->second;
    }
    const std::string body = page.value_or("{}");
    co_await writer.send(page ? 200 : 404, json_type(), body);
    co_return;
  }
  if (path == "/v1/kv_transfer/release") {
    {
      const auto root = Json::parse(request.body, nullptr, false);
      const std::lock_guard lock(mutex_);
      ++release_calls_;
      if (root.is_object() && root.contains("leases")) {
        for (const Json& lease : root["leases"]) released_.push_back(lease);
      } else {
        released_.push_back(root.is_object() ? root.value("lease", "?") : "?");
      }
    }
    co_await writer.send(200, json_type(), "{}");
    co_return;
  }
  if (path.starts_with("/v1/kv/") && path.ends_with("/renew")) {
    {
      const std::lock_guard lock(mutex_);
      renewed_.push_back(path.substr(7, path.size() - 13));
    }
    co_await writer.send(200, json_type(), R"({"ttl_ms":30000})");
    co_return;
  }
  SeenLeg leg;
  leg.path = path;
  leg.headers = request.head.headers;
  leg.leg = header_or_empty(leg.headers, "X-Kindred-Leg");
  leg.request_id = header_or_empty(leg.headers, "X-Request-Id");
  const std::string handoff = header_or_empty(leg.headers, "X-Kindred-Handoff-Bytes");
  const size_t handoff_bytes = handoff.empty() ? 0 : std::stoul(handoff);
  leg.body = request.body.substr(0, request.body.size() - handoff_bytes);
  leg.handoff = request.body.substr(leg.body.size());
  Script script;
  {
    const std::lock_guard lock(mutex_);
    legs_.push_back(leg);
    script = script_;
  }
  const auto watch = request.cancel.on_cancel([this] { ++cancelled_; });
  if (script) co_await script(leg, request, writer);
  else if (leg.leg == "prefill") co_await answer_prefill(leg, writer);
  else if (leg.leg == "decode") co_await answer_decode(leg, writer);
  else co_await answer_plain(leg, writer);
}

net::Task<void> FakeWorker::answer_prefill(const SeenLeg& leg, net::ResponseWriter& writer) {
  const bool stream = wants_stream(leg.body);
  const bool finished = finished_;
  Json reply = {{"v", 1},
                {"finished", finished},
                {"content_type", stream ? "text/event-stream" : "application/json"},
                {"usage", {{"prompt_tokens", 10}, {"cached_tokens", 0}, {"completion_tokens", 1}}},
                {"n", 1},
                {"max_tokens", 16},
                {"fingerprint", fingerprint_}};
  std::string first;
  if (stream) first = event("one") + (finished ? "data: [DONE]\n\n" : "");
  else if (finished) first = R"({"text":"one"})";
  reply["first"] = first;
  size_t number = 0;
  {
    const std::lock_guard lock(mutex_);
    number = legs_.size();
    if (!counts_.empty()) reply["expert_counts"] = parse_json(counts_);
  }
  if (!finished) {
    reply["lease"] = {
        {"id", fmt::format("lease-{}", number)}, {"bytes", 64}, {"hash", "00"}, {"ttl_ms", lease_ttl_ms_.load()}};
    if (releases_ > 1) reply["releases"] = releases_.load();
    reply["state"] = {{"opaque", "se\"cret"}, {"ids", {1, 2, 3}}};
  }
  const std::string body = reply.dump();
  co_await writer.send(200, content_type("application/vnd.kindred.prefill+json"), body);
}

net::Task<void> FakeWorker::answer_decode(const SeenLeg& leg, net::ResponseWriter& writer) {
  if (!wants_stream(leg.body)) {
    co_await writer.send(200, json_type(), R"({"text":"one two three"})");
    co_return;
  }
  co_await writer.start(200, events_type());
  const std::string two = event("two"), three = event("three [DONE] not yet");
  co_await writer.write(two);
  co_await writer.write(three);
  co_await writer.write("data: [DONE]\n\n");
  co_await writer.finish();
}

net::Task<void> FakeWorker::answer_plain(const SeenLeg& leg, net::ResponseWriter& writer) {
  if (wants_stream(leg.body)) {
    co_await answer_decode(leg, writer);
    co_return;
  }
  net::Headers headers = json_type();
  headers.add("X-Served-By", url());
  co_await writer.send(200, std::move(headers), R"({"text":"plain"})");
}

Answer parse_answer(const std::string& wire) {
  Answer out;
  const size_t head_end = wire.find("\r\n\r\n");
  if (head_end == std::string::npos) return out;
  const auto head = net::parse_response_head(std::string_view(wire).substr(0, head_end + 4), {});
  if (!head) return out;
  out.status = head->status;
  out.headers = head->headers;
  std::string_view rest = std::string_view(wire).substr(head_end + 4);
  if (!net::equals_ignore_case(header_or_empty(out.headers, "Transfer-Encoding"), "chunked")) {
    out.body = rest;
    out.complete = header_or_empty(out.headers, "Content-Length") == std::to_string(rest.size());
    return out;
  }
  net::ChunkTracker tracker;
  while (!rest.empty() && !tracker.done() && !tracker.failed()) {
    std::string_view payload;
    rest.remove_prefix(tracker.next(rest, payload));
    out.body += payload;
  }
  out.complete = tracker.done() && rest.empty();
  return out;
}

std::string request_text(const std::string& method, const std::string& path, const std::string& body,
                         const std::string& headers) {
  return fmt::format("{} {} HTTP/1.1\r\nHost: router\r\nConnection: close\r\nContent-Length: {}\r\n{}\r\n{}", method,
                     path, body.size(), headers, body);
}

std::string chat_body(bool stream, const std::string& more) {
  return fmt::format(R"({{"model":"m","messages":[{{"role":"user","content":"canary-prompt"}}],"stream":{}{}}})",
                     stream, more);
}

expert::ExpertShape test_shape() { return {{0}, 4, 1}; }

std::string counts_on(uint32_t expert) {
  expert::ExpertCounts counts(test_shape());
  counts.tokens = 10;
  counts.data[expert] = 10;
  return expert::counts_to_json(counts);
}

std::string cohort_file(const std::vector<uint32_t>& experts, const std::string& fingerprint) {
  expert::CohortData data;
  data.model = "m";
  data.model_fingerprint = fingerprint;
  data.shape = test_shape();
  data.idf.assign(data.shape.cells(), 1.0F);
  data.layer_mask = {1};
  data.greedy_layers = {0};
  data.rho = {0.5};
  for (const uint32_t expert : experts) {
    for (uint32_t e = 0; e < data.shape.experts; ++e) data.centroids.push_back(e == expert ? 1.0F : 0.0F);
  }
  const auto made = expert::CohortModel::make(std::move(data));
  EXPECT_TRUE(made.ok()) << (made.ok() ? "" : made.error().message);
  const std::string path = ::testing::TempDir() + "kindred_router_cohorts_" +
                           ::testing::UnitTest::GetInstance()->current_test_info()->name() + ".safetensors";
  EXPECT_TRUE(made.ok() && made->save(path).ok());
  return path;
}

FakeWorker& RouterTest::add(Role role, std::string fingerprint, std::shared_ptr<net::TlsServer> tls) {
  fakes_.push_back(std::make_unique<FakeWorker>(loop_, role, std::move(fingerprint), std::move(tls)));
  FakeWorker& fake = *fakes_.back();
  switch (role) {
    case Role::kPrefill: options_.prefill.push_back(fake.url()); break;
    case Role::kDecode: options_.decode.push_back(fake.url()); break;
    case Role::kBoth: options_.worker.push_back(fake.url()); break;
  }
  return fake;
}

void RouterTest::start(bool wait_until_ready) {
  options_.port = 0;
  options_.health_interval_ms = 50ms;
  options_.health_timeout_ms = 500ms;
  loop_.call([this] {
    auto made = Router::make(loop_.executor(), options_, clock_);
    EXPECT_TRUE(made.ok()) << (made.ok() ? "" : made.error().message);
    if (!made) return 0;
    router_ = *std::move(made);
    const Result<uint16_t> port = router_->listen();
    EXPECT_TRUE(port.ok());
    port_ = port ? *port : 0;
    return 0;
  });
  ASSERT_NE(port_, 0);
  const auto all_up = [this] {
    for (const fleet::WorkerStatus& worker : router_->core().fleet.status()) {
      if (worker.health == fleet::Health::kUnknown) return false;
    }
    return true;
  };
  if (!wait_until_ready) return;
  ASSERT_TRUE(eventually(all_up));
  ASSERT_TRUE(eventually([this] { return ready(); }));
}

void RouterTest::TearDown() {
  if (router_) {
    loop_.run([this]() -> net::Task<void> { co_await router_->drain(500ms); });
    loop_.call([this] {
      router_.reset();
      return 0;
    });
  }
  fakes_.clear();
  loop_.stop();
}

ConnectionPtr RouterTest::open(const std::string& method, const std::string& path, const std::string& body,
                               const std::string& headers) {
  ConnectionPtr connection(new net::testing::RawConnection(net::testing::raw_connect(port_)));  // cannot be moved
  connection->send(request_text(method, path, body, headers));
  return connection;
}

Answer RouterTest::call(const std::string& method, const std::string& path, const std::string& body,
                        const std::string& headers) {
  return parse_answer(open(method, path, body, headers)->read_to_end());
}

Answer RouterTest::chat(bool stream, const std::string& more) {
  return call("POST", "/v1/chat/completions", chat_body(stream, more), "Content-Type: application/json\r\n");
}

int64_t RouterTest::in_flight() {
  int64_t sum = 0;
  for (const fleet::WorkerStatus& worker : router_->core().fleet.status()) sum += worker.in_flight;
  return sum;
}

}  // namespace kindred::router::testing
