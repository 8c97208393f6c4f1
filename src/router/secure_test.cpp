// The router under TLS, towards clients and towards workers, and its traces at a collector.
#include <filesystem>

#include "base/json.h"
#include "net/http_client.h"
#include "net/testing_certificates.h"
#include "router/otlp.h"
#include "router/testing.h"

namespace kindred::router::testing {
namespace {

using net::testing::CertificateFiles;
using net::testing::TestAuthority;

class SecureTest : public RouterTest {
 protected:
  static std::shared_ptr<net::TlsServer> server_of(const CertificateFiles& files) {
    auto tls = net::TlsServer::load({files.certificate, files.key, ""});
    EXPECT_TRUE(tls.ok());
    return tls.ok() ? *tls : nullptr;
  }
  static std::shared_ptr<net::TlsClient> trusting(const std::string& ca) {
    auto tls = net::TlsClient::make({ca, "", ""});
    EXPECT_TRUE(tls.ok());
    return tls.ok() ? *tls : nullptr;
  }

  // One request over a connection of its own. Status 0: it could not be made.
  Answer secure_call(const std::string& ca, const std::string& method, const std::string& path,
                     const std::string& body = {}) {
    const std::shared_ptr<net::TlsClient> tls = trusting(ca);
    return loop_.run([&]() -> net::Task<Answer> {
      net::ClientOptions options;
      options.tls = tls;
      net::HttpClient client(loop_.executor(), options);
      net::RequestHead head;
      head.method = method;
      head.target = path;
      const std::array<std::string_view, 1> parts = {body};
      const net::Endpoint to{"127.0.0.1", port_, true};
      const net::CancelToken never;
      Answer out;
      auto response = co_await client.send(to, std::move(head), parts, never);
      if (!response) co_return out;
      out.status = (*response)->head().status;
      auto read = co_await (*response)->read_all(1 << 20);
      out.complete = read.ok();
      if (read) out.body = *std::move(read);
      co_return out;
    });
  }

  TestAuthority authority_;
};

TEST_F(SecureTest, ServesUnderTlsAndTakesANewCertificateAsItComes) {
  TestAuthority second;
  const CertificateFiles files = authority_.issue("router"), next = second.issue("router");
  options_.edge.tls_cert = files.certificate;
  options_.edge.tls_key = files.key;
  add(Role::kBoth, "");
  start(/*wait_until_ready=*/false);
  ASSERT_TRUE(eventually([&] { return secure_call(authority_.ca(), "GET", "/ready").status == 200; }));
  const Answer stream = secure_call(authority_.ca(), "POST", "/v1/chat/completions", chat_body(true));
  EXPECT_TRUE(stream.complete);
  EXPECT_TRUE(stream.body.ends_with("data: [DONE]\n\n"));
  EXPECT_EQ(secure_call(second.ca(), "GET", "/ready").status, 0);
  EXPECT_EQ(call("GET", "/ready").status, 0);  // not in clear
  for (const auto& [from, to] : {std::pair{next.certificate, files.certificate}, {next.key, files.key}}) {
    std::filesystem::copy_file(from, to, std::filesystem::copy_options::overwrite_existing);
  }
  EXPECT_TRUE(eventually([&] { return secure_call(second.ca(), "GET", "/ready").status == 200; }, 10s));
}

TEST_F(SecureTest, ReachesWorkersUnderTlsAndOnlyThoseItCanVerify) {
  TestAuthority other;
  options_.edge.upstream.tls = trusting(authority_.ca());
  FakeWorker& p = add(Role::kPrefill, "f0", server_of(authority_.issue("p")));
  FakeWorker& d = add(Role::kDecode, "f0", server_of(authority_.issue("d")));
  add(Role::kDecode, "f0", server_of(other.issue("stranger")));
  start(/*wait_until_ready=*/false);
  ASSERT_TRUE(eventually([&] { return ready(); }));
  for (int i = 0; i < 3; ++i) {
    const Answer answer = chat(true);
    EXPECT_EQ(answer.body, kWholeStream);
    EXPECT_TRUE(answer.complete);
  }
  EXPECT_EQ(p.leg_count(), 3U);
  EXPECT_EQ(d.leg_count(), 3U);
  EXPECT_EQ(fakes_[2]->leg_count(), 0U);
}

TEST_F(SecureTest, SaysWhichOptionIsWrong) {
  const auto error = [&](auto change) {
    return loop_.call([&] {
      RouterOptions options;
      options.worker = {"http://127.0.0.1:1"};
      change(options.edge);
      const auto made = Router::make(loop_.executor(), options, clock_);
      return made.ok() ? std::string("ok") : made.error().field;
    });
  };
  EXPECT_EQ(error([](EdgeOptions&) {}), "ok");
  EXPECT_EQ(error([](EdgeOptions& edge) { edge.tls_cert = "x"; }), "tls_key");
  EXPECT_EQ(error([](EdgeOptions& edge) { edge.tls_client_ca = "x"; }), "tls_client_ca");
  EXPECT_EQ(error([](EdgeOptions& edge) { edge.tls_cert = edge.tls_key = "/nonexistent"; }), "tls_cert");
  EXPECT_EQ(error([](EdgeOptions& edge) { edge.otlp_endpoint = "nonsense"; }), "otlp_endpoint");
}

// ---- Traces.

// Takes spans, or refuses them.
class Collector {
 public:
  explicit Collector(net::testing::TestLoop& loop, int status = 200) : loop_(loop), status_(status) {
    loop_.call([this] {
      server_ = std::make_unique<net::HttpServer>(
          loop_.executor(), net::ServerOptions{},
          [this](net::Request& request, net::ResponseWriter& writer) { return handle(request, writer); });
      port_ = *server_->listen("127.0.0.1", 0);
    });
  }
  ~Collector() {
    loop_.run([this]() -> net::Task<void> { co_await server_->drain(0ms); });
    loop_.call([this] { server_.reset(); });
  }

  std::string url() const { return net::Endpoint{"127.0.0.1", port_}.url(); }
  std::string text() const {
    const std::lock_guard lock(mutex_);
    return text_;
  }
  std::vector<Json> spans() const {
    const std::lock_guard lock(mutex_);
    return spans_;
  }

 private:
  net::Task<void> handle(net::Request& request, net::ResponseWriter& writer) {
    const Json root = parse_json(request.body);
    {
      const std::lock_guard lock(mutex_);
      text_ += request.body;
      EXPECT_EQ(request.head.target, "/v1/traces");
      for (const Json& span : root["resourceSpans"][0]["scopeSpans"][0]["spans"]) spans_.push_back(span);
    }
    co_await writer.send(status_, json_type(), "{}");
  }

  net::testing::TestLoop& loop_;
  const int status_;
  uint16_t port_ = 0;
  std::unique_ptr<net::HttpServer> server_;
  mutable std::mutex mutex_;
  std::string text_;
  std::vector<Json> spans_;
};

const Json* find_span(const std::vector<Json>& spans, const std::string& name) {
  for (const Json& span : spans) {
    if (span["name"] == name) return &span;
  }
  return nullptr;
}

std::string attribute(const Json& span, const std::string& key) {
  for (const Json& entry : span["attributes"]) {
    if (entry["key"] == key)
      return entry["value"].front().is_string() ? entry["value"].front().get<std::string>() : "?";
  }
  return "";
}

TEST_F(SecureTest, ARequestIsATraceOfItsLegsAndDecision) {
  auto collector = std::make_unique<Collector>(loop_);
  options_.edge.otlp_endpoint = collector->url();
  FakeWorker& p = add(Role::kPrefill);
  FakeWorker& d = add(Role::kDecode);
  start();
  const std::string body = chat_body(true);
  const Answer answer =
      call("POST", "/v1/chat/completions", body,
           "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\nX-Request-Id: traced-1\r\n");
  EXPECT_TRUE(answer.complete);
  std::vector<Json> mine;
  ASSERT_TRUE(eventually([&] {
    mine.clear();
    for (const Json& span : collector->spans()) {
      if (span["traceId"] == "0af7651916cd43dd8448eb211c80319c") mine.push_back(span);
    }
    return mine.size() == 4;
  }));
  const Json *request = find_span(mine, "request"), *prefill = find_span(mine, "prefill"),
             *decision = find_span(mine, "decision"), *decode = find_span(mine, "decode");
  ASSERT_TRUE(request != nullptr && prefill != nullptr && decision != nullptr && decode != nullptr);
  EXPECT_EQ((*request)["parentSpanId"], "b7ad6b7169203331");
  EXPECT_EQ((*request)["kind"], 2);
  for (const Json* child : {prefill, decision, decode}) {
    EXPECT_EQ((*child)["parentSpanId"], (*request)["spanId"]);
    EXPECT_LE((*child)["startTimeUnixNano"].get<std::string>(), (*child)["endTimeUnixNano"].get<std::string>());
  }
  EXPECT_EQ(attribute(*request, "kindred.request_id"), "traced-1");
  EXPECT_EQ(attribute(*request, "http.response.status_code"), "200");
  EXPECT_EQ(attribute(*request, "gen_ai.usage.input_tokens"), "10");
  EXPECT_NE(attribute(*decision, "kindred.reason"), "");
  // Each worker continues the span of its leg.
  ASSERT_EQ(p.leg_count(), 1U);
  ASSERT_EQ(d.leg_count(), 1U);
  EXPECT_NE(p.legs()[0].headers.find("traceparent")->find((*prefill)["spanId"].get<std::string>()), std::string::npos);
  EXPECT_NE(d.legs()[0].headers.find("traceparent")->find((*decode)["spanId"].get<std::string>()), std::string::npos);
  EXPECT_EQ(collector->text().find("canary"), std::string::npos);
  EXPECT_TRUE(eventually([&] { return metrics().find("kindred_router_spans_exported_total 0") == std::string::npos; }));
  loop_.run([this]() -> net::Task<void> { co_await router_->drain(500ms); });
  loop_.call([this] { router_.reset(); });
}

TEST_F(SecureTest, ACollectorThatRefusesCostsSpansAndNothingElse) {
  Collector collector(loop_, 500);
  options_.edge.otlp_endpoint = collector.url();
  add(Role::kBoth, "");
  start();
  EXPECT_EQ(chat(false).status, 200);
  EXPECT_TRUE(
      eventually([&] { return metrics().find("kindred_router_spans_dropped_total 0\n") == std::string::npos; }));
  loop_.run([this]() -> net::Task<void> { co_await router_->drain(500ms); });
  loop_.call([this] { router_.reset(); });
}

TEST_F(SecureTest, NothingIsRecordedThatIsNotSampled) {
  Collector collector(loop_);
  options_.edge.otlp_endpoint = collector.url();
  options_.edge.trace_sample = 0;
  FakeWorker& w = add(Role::kBoth, "");
  start();
  EXPECT_EQ(chat(false).status, 200);
  ASSERT_EQ(w.leg_count(), 1U);
  EXPECT_TRUE(w.legs()[0].headers.find("traceparent")->ends_with("-00"));
  loop_.run([this]() -> net::Task<void> { co_await router_->drain(500ms); });  // flushes
  EXPECT_TRUE(collector.spans().empty());
  loop_.call([this] { router_.reset(); });
}

TEST(SpanQueue, IsBoundedAndCountsWhatItDrops) {
  SpanQueue queue;
  EXPECT_EQ(queue.add(std::vector<Span>(SpanQueue::kMostSpans - 1)), 0U);
  EXPECT_EQ(queue.add(std::vector<Span>(3)), 2U);
  EXPECT_EQ(queue.take(10).size(), 10U);
  EXPECT_EQ(queue.size(), SpanQueue::kMostSpans - 10);
}

TEST(Otlp, WritesWhatTheProtocolSays) {
  Span span;
  span.trace_id = std::string(32, 'a');
  span.id = std::string(16, 'b');
  span.name = "request";
  span.kind = Span::Kind::kServer;
  span.begin = MonotonicTime(std::chrono::nanoseconds(5));
  span.end = MonotonicTime(std::chrono::nanoseconds(9));
  span.failed = true;
  span.attributes.emplace_back("text", "a \"b\"");
  span.attributes.emplace_back("whole", int64_t{7});
  span.attributes.emplace_back("real", 0.5);
  const Json root = parse_json(otlp_json({span}, 1'000));
  ASSERT_TRUE(root.is_object());
  const Json expected = {{"traceId", span.trace_id},
                         {"spanId", span.id},
                         {"name", "request"},
                         {"kind", 2},
                         {"startTimeUnixNano", "1005"},
                         {"endTimeUnixNano", "1009"},
                         {"attributes",
                          {{{"key", "text"}, {"value", {{"stringValue", "a \"b\""}}}},
                           {{"key", "whole"}, {"value", {{"intValue", "7"}}}},
                           {{"key", "real"}, {"value", {{"doubleValue", 0.5}}}}}},
                         {"status", {{"code", 2}}}};
  EXPECT_EQ(root["resourceSpans"][0]["scopeSpans"][0]["spans"][0], expected);
  EXPECT_EQ(parse_otlp_endpoint("http://h:4318")->path, "/v1/traces");
  EXPECT_EQ(parse_otlp_endpoint("http://h:4318/")->path, "/v1/traces");
  EXPECT_EQ(parse_otlp_endpoint("https://h:4318/custom/v1")->path, "/custom/v1");
  EXPECT_FALSE(parse_otlp_endpoint("h").ok());
}

}  // namespace
}  // namespace kindred::router::testing
