#include "router/visit.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>

#include "router/leg_load.h"

namespace kindred::router {
namespace {

ApiError unauthorized(Exchange& exchange, std::string_view message) {
  exchange.answer_headers.add("WWW-Authenticate", "Bearer");
  ApiError error = api_error(invalid(std::string(message)));
  error.status = 401;
  error.code = "invalid_api_key";
  return error;
}

std::optional<ApiError> repeated(const net::Headers& headers) {
  for (const std::string_view name : {"Authorization", "x-api-key"}) {
    // Whoever reads the first and whoever reads the last would see different callers.
    if (headers.count(name) > 1) return api_error(invalid(fmt::format("{} is given more than once", name)));
  }
  return std::nullopt;
}

}  // namespace

Visit::Visit(Core& core, Exchange& exchange) : core_(core), exchange_(exchange) {
  exchange.strip_credentials = core.edge->strips_credentials();
  exchange.notes.watched = core.edge->watches();
  exchange.trace.emplace(exchange.request.head.headers, core.edge->trace_ids, core.edge->export_share());
  if (exchange.trace->recorded()) span_ = exchange.trace->open("request", Span::Kind::kServer, exchange.arrived);
}

std::optional<ApiError> Visit::admit_caller() {
  const net::Headers& headers = exchange_.request.head.headers;
  if (auto twice = repeated(headers)) return twice;
  if (!core_.edge->takes_keys()) return std::nullopt;
  const std::string_view presented = presented_key(headers);
  if (presented.empty()) {
    return unauthorized(exchange_, "an API key is needed: send it as \"Authorization: Bearer KEY\" or as x-api-key");
  }
  const std::shared_ptr<const KeyRing> ring = core_.edge->keys();
  const KeyRing::Key* key = ring->find(presented);
  if (key == nullptr) return unauthorized(exchange_, "the API key is not known here");
  exchange_.key_name = key->name;
  limits_ = key->limits;
  return std::nullopt;
}

std::optional<ApiError> Visit::admit_operator(bool own_listener) const {
  const net::Headers& headers = exchange_.request.head.headers;
  if (auto twice = repeated(headers)) return twice;
  const std::string& key = core_.edge->admin_key();
  if (key.empty()) {
    if (own_listener || !core_.edge->takes_keys()) return std::nullopt;
    ApiError error = api_error(invalid("with API keys, operators' paths need --admin-port or an admin key"));
    error.status = 403;
    error.code = "admin_off";
    return error;
  }
  const std::string_view presented = presented_key(headers);
  if (presented.empty()) return unauthorized(exchange_, "the admin key is needed, as \"Authorization: Bearer KEY\"");
  if (!same_secret(presented, key)) return unauthorized(exchange_, "this is not the admin key");
  return std::nullopt;
}

std::optional<ApiError> Visit::charge() {
  if (limits_ == KeyLimits{}) return std::nullopt;
  const uint64_t estimate = exchange_.request.body.size() / kBytesPerToken;
  const RateLimiter::Verdict verdict = core_.edge->limiter.admit(exchange_.key_name, limits_, estimate);
  add_rate_headers(exchange_.answer_headers, verdict);
  if (verdict.admitted) {
    charged_ = true;
    charged_tokens_ = estimate;
    return std::nullopt;
  }
  ApiError error = api_error(Error{
      ErrorCode::kExhausted, fmt::format("the limit of {} a minute of this API key is reached; try again in {:.1f} s",
                                         verdict.short_of, verdict.retry_after_s)});
  error.type = verdict.short_of;
  error.code = "rate_limit_exceeded";
  error.retry_after_s = static_cast<int>(std::ceil(verdict.retry_after_s));
  error.shed = true;
  return error;
}

Visit::~Visit() {
  if (charged_) {
    const TokenUsage used = exchange_.notes.best_usage();
    const bool answered = exchange_.outcome == Outcome::kOk || exchange_.outcome == Outcome::kCut ||
                          exchange_.outcome == Outcome::kCancelled;
    // What no worker served costs no tokens. Who leaves before anything was told pays what was estimated.
    const uint64_t actual =
        answered ? used.prompt_tokens.value_or(charged_tokens_) + used.output_tokens.value_or(0) : 0;
    core_.edge->limiter.settle(exchange_.key_name, charged_tokens_, actual);
  }
  if (const auto log = core_.edge->access_log()) write_line(*log);
  if (span_) hand_in_spans();
}

void Visit::hand_in_spans() {
  const RequestNotes& notes = exchange_.notes;
  Span& span = exchange_.trace->span(*span_);
  auto& attributes = span.attributes;
  attributes.emplace_back("http.request.method", exchange_.request.head.method);
  attributes.emplace_back("url.path", std::string(exchange_.request.head.path()));
  attributes.emplace_back("http.response.status_code", int64_t{exchange_.status});
  attributes.emplace_back("kindred.request_id", exchange_.id);
  attributes.emplace_back("kindred.outcome", std::string(to_string(exchange_.outcome)));
  if (!exchange_.key_name.empty()) attributes.emplace_back("kindred.key", exchange_.key_name);
  if (!notes.decode_worker.empty() || !notes.prefill_worker.empty()) {
    attributes.emplace_back("gen_ai.request.model", exchange_.model);
  }
  const TokenUsage usage = notes.best_usage();
  if (usage.prompt_tokens) {
    attributes.emplace_back("gen_ai.usage.input_tokens", static_cast<int64_t>(*usage.prompt_tokens));
  }
  if (usage.output_tokens) {
    attributes.emplace_back("gen_ai.usage.output_tokens", static_cast<int64_t>(*usage.output_tokens));
  }
  if (notes.first_event)
    attributes.emplace_back("kindred.ttft_s", seconds_between(exchange_.arrived, *notes.first_event));
  span.failed = exchange_.outcome == Outcome::kFailed || exchange_.outcome == Outcome::kCut;
  const size_t dropped = core_.edge->spans().add(exchange_.trace->take(core_.clock.now()));
  if (dropped > 0) core_.metrics.spans_dropped.add(static_cast<double>(dropped));
}

void Visit::write_line(AccessLog& log) const {
  const RequestNotes& notes = exchange_.notes;
  const TokenUsage usage = notes.best_usage();
  AccessRecord record;
  record.unix_ms =
      std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch())
          .count();
  record.id = exchange_.id;
  record.peer = exchange_.request.peer;
  record.key_name = exchange_.key_name;
  record.method = exchange_.request.head.method;
  record.path = exchange_.request.head.path();
  // A model nobody serves is whatever a client wrote there.
  if (!notes.decode_worker.empty() || !notes.prefill_worker.empty()) record.model = exchange_.model;
  record.outcome = to_string(exchange_.outcome);
  record.status = exchange_.status;
  record.bytes_in = notes.body_bytes;
  record.bytes_out = exchange_.writer.bytes_written();
  record.duration_ms = seconds_between(exchange_.arrived, core_.clock.now()) * 1e3;
  if (notes.first_event) record.ttft_ms = seconds_between(exchange_.arrived, *notes.first_event) * 1e3;
  record.prefill_worker = notes.prefill_worker;
  record.decode_worker = notes.decode_worker;
  record.policy = notes.policy;
  record.reason = notes.reason;
  record.prompt_tokens = usage.prompt_tokens;
  record.output_tokens = usage.output_tokens;
  if (exchange_.trace) record.trace_id = exchange_.trace->trace_id();
  log.write(record);
}

}  // namespace kindred::router
