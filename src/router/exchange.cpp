#include "router/exchange.h"

#include <fmt/format.h>

#include <algorithm>

#include "router/expert_fields.h"
#include "router/headers.h"

namespace kindred::router {
namespace {

constexpr size_t kErrorBodyBytes = 1024 * 1024;

Outcome outcome_of(int status) {
  if (status >= 500) return Outcome::kFailed;
  return status >= 400 ? Outcome::kClientError : Outcome::kOk;
}

// False: the client is gone.
net::Task<bool> send(Exchange& exchange, int status, net::Headers headers, std::string_view body) {
  exchange.status = status;
  for (const net::Header& header : exchange.answer_headers) headers.set(header.name, header.value);
  return exchange.writer.send(status, std::move(headers), body);
}

}  // namespace

net::Task<void> Exchange::answer(int with_status, net::Headers headers, std::string_view body) {
  const bool taken = co_await send(*this, with_status, std::move(headers), body);
  outcome = taken ? outcome_of(with_status) : Outcome::kCancelled;
}

net::Task<void> Exchange::relay(int with_status, net::Headers headers, std::string body) {
  if (!scan.wants_counts) remove_expert_counts(body);
  // As answer() does, without its coroutine.
  const bool taken = co_await send(*this, with_status, std::move(headers), body);
  outcome = taken ? outcome_of(with_status) : Outcome::kCancelled;
}

net::Task<void> Exchange::fail(ApiError error) {
  if (writer.started()) {
    const std::optional<Bridge> bridge = meter ? meter->bridge() : Bridge{};
    if (bridge) {
      if (!bridge->framed.empty()) co_await writer.write_framed(bridge->framed);
      const std::string event =
          std::string(bridge->payload) + error_event(error, form(), meter ? meter->watch().events() : 0);
      co_await writer.write(event);
    }
    writer.abort();
    outcome = Outcome::kCut;
    co_return;
  }
  net::Headers headers;
  headers.add("Content-Type", "application/json");
  headers.add(kRequestIdHeader, id);
  if (error.retry_after_s > 0) headers.add("Retry-After", fmt::format("{}", error.retry_after_s));
  if (!error.allow.empty()) headers.add("Allow", error.allow);
  const std::string body = error_json(error, form());
  co_await answer(error.status, std::move(headers), body);
  if (outcome != Outcome::kCancelled && error.shed) outcome = Outcome::kRejected;
}

net::Task<void> Exchange::fail(LegFailure failure) {
  if (failure.status == 0 || writer.started()) {
    co_await fail(std::move(failure.error));
    co_return;
  }
  co_await answer(failure.status, std::move(failure.headers), failure.body);
}

StreamMeter& Exchange::measure(Core& core) {
  if (!meter) {
    meter.emplace(core.clock, arrived, core.metrics, std::max<uint64_t>(1, scan.n), form());
    if (notes.watched) meter->note_in(&notes);
  }
  return *meter;
}

net::Task<bool> Exchange::start_stream(net::Headers headers) {
  status = 200;
  for (const net::Header& header : answer_headers) headers.set(header.name, header.value);
  co_return co_await writer.start(200, std::move(headers));
}

net::Task<LegFailure> read_answer(net::ClientResponse& response, std::string_view request_id) {
  LegFailure out;
  out.status = response.head().status;
  out.headers = to_client(response.head().headers, request_id);
  Result<std::string> body = co_await response.read_all(kErrorBodyBytes);
  if (!body) {
    out.error = bad_worker_reply("a worker's error answer could not be read");
    out.status = 0;
    co_return out;
  }
  out.body = *std::move(body);
  UpstreamError said = parse_upstream_error(out.body);
  out.error = bad_worker_reply(said.message.empty() ? fmt::format("a worker answered with status {}", out.status)
                                                    : std::move(said.message));
  if (!said.code.empty()) out.error.code = std::move(said.code);
  co_return out;
}

LegFailure transport_failure(Core& core, fleet::WorkerId worker, std::string_view who, const Error& error) {
  // Addresses and causes are for the operator's log; the client gets the kind of failure.
  const std::string why = fmt::format("{}: {}", to_string(error.code), error.message);
  LegFailure out;
  switch (error.code) {
    case ErrorCode::kUnavailable:
      core.worker_refused(worker, why);
      out.error = api_error({ErrorCode::kUnavailable, fmt::format("{} could not be reached", who)});
      break;
    case ErrorCode::kTimeout:
      core.worker_failed(worker, why);
      out.error = api_error({ErrorCode::kTimeout, fmt::format("{} did not answer in time", who)});
      break;
    case ErrorCode::kExhausted:  // the router's own limit: no fault of the worker's
      out.error = api_error({ErrorCode::kExhausted, fmt::format("no connection to {} is free", who)});
      break;
    case ErrorCode::kCancelled: out.error = api_error(error); break;
    default: core.worker_failed(worker, why); out.error = bad_worker_reply(fmt::format("{} broke off its answer", who));
  }
  return out;
}

bool worth_retrying(const Error& error) {
  return error.code == ErrorCode::kUnavailable || error.code == ErrorCode::kIo || error.code == ErrorCode::kCorrupt ||
         error.code == ErrorCode::kExhausted;
}

net::RequestHead worker_head(const Exchange& exchange) {
  net::RequestHead head;
  head.method = exchange.request.head.method;
  head.target = exchange.request.head.target;
  head.headers = to_worker(exchange.request.head.headers, exchange.id);
  // The router reads replies, joins those of two workers, and may have to add an error to a stream.
  head.headers.erase("Accept-Encoding");
  if (exchange.strip_credentials) {
    head.headers.erase("Authorization");
    head.headers.erase("x-api-key");
  }
  if (exchange.trace) {
    if (exchange.trace->begun_here()) head.headers.erase("tracestate");  // of a trace that cannot be continued
    head.headers.set("traceparent", exchange.trace->traceparent());
  }
  return head;
}

}  // namespace kindred::router
