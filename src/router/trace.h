// W3C trace context, and the spans of one request.
//
// Thread-safety: TraceIds is thread-safe; the rest are plain values.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "base/clock.h"
#include "net/http_message.h"

namespace kindred::router {

// Makes ids that are unique for all purposes: 64 bits of a seed from the system, mixed with a counter.
class TraceIds {
 public:
  explicit TraceIds(uint64_t seed) : seed_(seed) {}
  uint64_t next();  // never 0
  // Whether a trace that begins here is recorded, by its id, so that all routers agree.
  static bool sampled(uint64_t trace_low, double share);

 private:
  const uint64_t seed_;
  std::atomic<uint64_t> count_{0};
};

// `traceparent` as it arrived.
struct TraceParent {
  std::string trace_id;  // 32 lower-case hex digits
  std::string span_id;   // 16
  bool sampled = false;
};
// Nothing where it is missing, given twice, or not as the recommendation has it; then a trace begins here.
std::optional<TraceParent> parse_traceparent(const net::Headers& headers);

using SpanValue = std::variant<std::string, int64_t, double>;

struct Span {
  enum class Kind { kInternal = 1, kServer = 2, kClient = 3 };  // OTLP's numbers
  std::string trace_id, id, parent;
  std::string_view name;  // a literal
  Kind kind = Kind::kInternal;
  MonotonicTime begin{}, end{};
  bool failed = false;
  std::vector<std::pair<std::string_view, SpanValue>> attributes;  // names are literals
};

// The part of a trace that is this request's. Not recorded: it only passes the context on.
class RequestTrace {
 public:
  static constexpr size_t kMostSpans = 64;  // a request that is retried more often loses the later ones

  // `export_share`: nothing without an exporter; else the share of the traces begun here that are recorded.
  // One that was begun elsewhere is recorded if it says so.
  RequestTrace(const net::Headers& headers, TraceIds& ids, std::optional<double> export_share);

  bool recorded() const { return recorded_; }
  const std::string& trace_id() const { return trace_id_; }
  bool begun_here() const { return begun_here_; }
  // For a request to a worker, made now: its parent is the span that was opened last of those that are open.
  std::string traceparent() const;

  // The first span is the request's; the others are its children, whether they follow each other or overlap.
  // Returns a handle, or nothing where none is recorded.
  std::optional<size_t> open(std::string_view name, Span::Kind kind, MonotonicTime now);
  Span& span(size_t handle) { return spans_[handle]; }
  void close(size_t handle, MonotonicTime now);
  // All of them, those still open closed at `now`.
  std::vector<Span> take(MonotonicTime now);

 private:
  TraceIds& ids_;
  std::string trace_id_;
  std::string parent_;   // the client's span, or empty
  std::string outside_;  // what stands for our own span where none is recorded
  bool sampled_ = false, recorded_ = false, begun_here_ = false;
  std::vector<Span> spans_;
  std::vector<size_t> open_;  // in order of opening
};

// A span that is as long as the scope.
class ScopedSpan {
 public:
  ScopedSpan(std::optional<RequestTrace>& trace, const Clock& clock, std::string_view name, Span::Kind kind)
      : trace_(trace), clock_(clock) {
    if (trace && trace->recorded()) handle_ = trace->open(name, kind, clock.now());
  }
  ~ScopedSpan() {
    if (handle_) trace_->close(*handle_, clock_.now());
  }
  ScopedSpan(const ScopedSpan&) = delete;
  ScopedSpan& operator=(const ScopedSpan&) = delete;

  void set(std::string_view name, SpanValue value) {
    if (handle_) trace_->span(*handle_).attributes.emplace_back(name, std::move(value));
  }
  // For values that take work to make: nobody may be looking.
  bool recorded() const { return handle_.has_value(); }
  void failed() {
    if (handle_) trace_->span(*handle_).failed = true;
  }

 private:
  std::optional<RequestTrace>& trace_;
  const Clock& clock_;
  std::optional<size_t> handle_;
};

}  // namespace kindred::router
