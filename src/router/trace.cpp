#include "router/trace.h"

#include <algorithm>

#include "base/bytes.h"
#include "base/rng.h"

namespace kindred::router {
namespace {

bool is_hex(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

bool is_id(std::string_view text) { return is_hex(text) && text.find_first_not_of('0') != std::string_view::npos; }

}  // namespace

uint64_t TraceIds::next() {
  const uint64_t id = mix64(seed_ ^ mix64(count_.fetch_add(1, std::memory_order_relaxed)));
  return id == 0 ? 1 : id;
}

bool TraceIds::sampled(uint64_t trace_low, double share) {
  return static_cast<double>(trace_low >> 11) * 0x1p-53 < share;
}

std::optional<TraceParent> parse_traceparent(const net::Headers& headers) {
  if (headers.count("traceparent") != 1) return std::nullopt;
  const std::string_view text = *headers.find("traceparent");
  // version "-" trace-id "-" parent-id "-" flags; a later version may have more behind that.
  if (text.size() < 55 || text[2] != '-' || text[35] != '-' || text[52] != '-') return std::nullopt;
  const std::string_view version = text.substr(0, 2), flags = text.substr(53, 2);
  if (!is_hex(version) || version == "ff" || !is_hex(flags)) return std::nullopt;
  if (version == "00" ? text.size() != 55 : text.size() > 55 && text[55] != '-') return std::nullopt;
  TraceParent out;
  out.trace_id = text.substr(3, 32);
  out.span_id = text.substr(36, 16);
  if (!is_id(out.trace_id) || !is_id(out.span_id)) return std::nullopt;
  const char low = flags[1];
  out.sampled = ((low <= '9' ? low - '0' : low - 'a' + 10) & 1) != 0;
  return out;
}

RequestTrace::RequestTrace(const net::Headers& headers, TraceIds& ids, std::optional<double> export_share) : ids_(ids) {
  if (std::optional<TraceParent> given = parse_traceparent(headers)) {
    trace_id_ = std::move(given->trace_id);
    parent_ = std::move(given->span_id);
    outside_ = parent_;
    sampled_ = given->sampled;
    recorded_ = export_share.has_value() && sampled_;
    return;
  }
  begun_here_ = true;
  const uint64_t high = ids.next(), low = ids.next();
  trace_id_.reserve(32);
  trace_id_.append(hex64(high)).append(hex64(low));
  outside_ = hex64(ids.next());
  sampled_ = recorded_ = export_share.has_value() && TraceIds::sampled(low, *export_share);
}

std::string RequestTrace::traceparent() const {
  const std::string& span = open_.empty() ? outside_ : spans_[open_.back()].id;
  std::string out;
  out.reserve(55);
  out.append("00-").append(trace_id_).append("-").append(span).append(sampled_ ? "-01" : "-00");
  return out;
}

std::optional<size_t> RequestTrace::open(std::string_view name, Span::Kind kind, MonotonicTime now) {
  if (!recorded_ || spans_.size() == kMostSpans) return std::nullopt;
  Span span;
  span.trace_id = trace_id_;
  span.id = hex64(ids_.next());
  span.parent = spans_.empty() ? parent_ : spans_.front().id;
  span.name = name;
  span.kind = kind;
  span.begin = now;
  open_.push_back(spans_.size());
  spans_.push_back(std::move(span));
  return spans_.size() - 1;
}

void RequestTrace::close(size_t handle, MonotonicTime now) {
  spans_[handle].end = now;
  std::erase(open_, handle);
}

std::vector<Span> RequestTrace::take(MonotonicTime now) {
  for (const size_t handle : open_) spans_[handle].end = now;
  open_.clear();
  recorded_ = false;  // a handle that is closed from here on would have no span
  return std::move(spans_);
}

}  // namespace kindred::router
