#include "router/otlp.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <iterator>

#include "base/bytes.h"
#include "router/core.h"
#include "router/edge.h"

namespace kindred::router {
namespace {

using namespace std::chrono_literals;

constexpr size_t kSpansAtOnce = 512;
constexpr std::chrono::milliseconds kExportInterval{500};
constexpr std::chrono::milliseconds kExportTimeout{5'000};
constexpr size_t kCollectorAnswerBytes = 64 * 1024;

void append_value(std::string& out, const SpanValue& value) {
  const auto to = std::back_inserter(out);
  if (const auto* text = std::get_if<std::string>(&value)) {
    out += R"({"stringValue":)";
    append_json_string(out, *text);
  } else if (const auto* whole = std::get_if<int64_t>(&value)) {
    fmt::format_to(to, R"({{"intValue":"{}")", *whole);  // 64-bit integers are strings in protobuf's JSON
  } else {
    fmt::format_to(to, R"({{"doubleValue":{})", std::get<double>(value));
  }
  out += '}';
}

void append_span(std::string& out, const Span& span, int64_t unix_ns_at_origin) {
  const auto unix_ns = [&](MonotonicTime time) { return unix_ns_at_origin + time.time_since_epoch().count(); };
  fmt::format_to(std::back_inserter(out), R"({{"traceId":"{}","spanId":"{}",)", span.trace_id, span.id);
  if (!span.parent.empty()) fmt::format_to(std::back_inserter(out), R"("parentSpanId":"{}",)", span.parent);
  fmt::format_to(std::back_inserter(out),
                 R"("name":"{}","kind":{},"startTimeUnixNano":"{}","endTimeUnixNano":"{}","attributes":[)", span.name,
                 static_cast<int>(span.kind), unix_ns(span.begin), unix_ns(std::max(span.begin, span.end)));
  for (size_t i = 0; i < span.attributes.size(); ++i) {
    fmt::format_to(std::back_inserter(out), R"({}{{"key":"{}","value":)", i == 0 ? "" : ",", span.attributes[i].first);
    append_value(out, span.attributes[i].second);
    out += '}';
  }
  out += span.failed ? R"(],"status":{"code":2}})" : "]}";
}

net::Task<bool> post(CorePtr core, std::string body, std::chrono::milliseconds timeout) {
  const OtlpTarget target = *core->edge->otlp();
  net::RequestHead head;
  head.method = "POST";
  head.target = target.path;
  head.headers.add("Content-Type", "application/json");
  const std::array<std::string_view, 1> parts = {body};
  net::RequestDeadlines deadlines;
  deadlines.head_ms = timeout;
  deadlines.read_ms = timeout;
  const net::CancelToken never;  // the deadlines end it
  auto response = co_await core->export_client.send(target.endpoint, std::move(head), parts, never, deadlines);
  if (!response) co_return false;
  const int status = (*response)->head().status;
  const Result<std::string> answer = co_await (*response)->read_all(kCollectorAnswerBytes);
  co_return answer.ok() && status >= 200 && status < 300;
}

// One batch. False: nothing was queued, or it was not taken.
net::Task<bool> send_batch(CorePtr core, std::chrono::milliseconds timeout) {
  const std::vector<Span> spans = core->edge->spans().take(kSpansAtOnce);
  if (spans.empty()) co_return false;
  const int64_t unix_ns =
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch()).count();
  std::string body = otlp_json(spans, unix_ns - core->clock.now().time_since_epoch().count());
  const bool taken = co_await post(core, std::move(body), timeout);
  (taken ? core->metrics.spans_exported : core->metrics.spans_dropped).add(static_cast<double>(spans.size()));
  co_return taken;
}

}  // namespace

Result<OtlpTarget> parse_otlp_endpoint(const std::string& url) {
  OtlpTarget out;
  const size_t scheme = url.find("://");
  const size_t slash = url.find('/', scheme == std::string::npos ? 0 : scheme + 3);
  auto endpoint = net::parse_endpoint(url.substr(0, slash));
  if (!endpoint) return invalid(fmt::format("otlp_endpoint: {}", endpoint.error().message), "otlp_endpoint");
  out.endpoint = *std::move(endpoint);
  if (slash != std::string::npos && slash + 1 < url.size()) out.path = url.substr(slash);
  return out;
}

size_t SpanQueue::add(std::vector<Span> spans) {
  const std::lock_guard lock(mutex_);
  const size_t fit = std::min(spans.size(), kMostSpans - spans_.size());
  std::move(spans.begin(), spans.begin() + static_cast<ptrdiff_t>(fit), std::back_inserter(spans_));
  return spans.size() - fit;
}

std::vector<Span> SpanQueue::take(size_t most) {
  const std::lock_guard lock(mutex_);
  const auto end = spans_.begin() + static_cast<ptrdiff_t>(std::min(most, spans_.size()));
  std::vector<Span> out(std::make_move_iterator(spans_.begin()), std::make_move_iterator(end));
  spans_.erase(spans_.begin(), end);
  return out;
}

size_t SpanQueue::size() const {
  const std::lock_guard lock(mutex_);
  return spans_.size();
}

std::string otlp_json(const std::vector<Span>& spans, int64_t unix_ns_at_origin) {
  std::string out =
      R"({"resourceSpans":[{"resource":{"attributes":[{"key":"service.name","value":{"stringValue":"kindred-router"}}]},)"
      R"("scopeSpans":[{"scope":{"name":"kindred"},"spans":[)";
  for (size_t i = 0; i < spans.size(); ++i) {
    if (i > 0) out += ',';
    append_span(out, spans[i], unix_ns_at_origin);
  }
  return out + "]}]}]}";
}

net::Task<void> export_spans(CorePtr core) {
  net::asio::steady_timer pause(core->executor);
  const auto closing = core->closing.token().on_cancel([&pause] { pause.cancel(); });
  while (!core->closing.cancelled()) {
    pause.expires_after(kExportInterval);
    co_await pause.async_wait(net::kNoThrow);
    bool more = true;
    while (more && !core->closing.cancelled()) more = co_await send_batch(core, kExportTimeout);
  }
}

net::Task<void> flush_spans(CorePtr core, std::chrono::milliseconds deadline) {
  const auto until = std::chrono::steady_clock::now() + deadline;
  bool more = true;
  while (more && std::chrono::steady_clock::now() < until) more = co_await send_batch(core, deadline);
}

}  // namespace kindred::router
