#include "router/whole_leg.h"

#include <array>

#include "router/decode_room.h"
#include "router/headers.h"

namespace kindred::router {
namespace {

// These two for the sake of the stream's frame: what they make on the way would have room in it all the time.
net::Task<void> read_failure(net::ClientResponse& response, std::string_view request_id, LegFailure& into) {
  into = co_await read_answer(response, request_id);
}

net::Task<void> cut_off(Core& core, Exchange& exchange, fleet::WorkerId worker, std::string_view who,
                        const Error& error) {
  return exchange.fail(transport_failure(core, worker, who, error));
}

}  // namespace

net::Task<bool> WholeLeg::run(fleet::WorkerId worker, net::RequestHead head, std::string_view body,
                              net::CancelToken cancel, fleet::LoadGuard* guard) {
  guard_ = guard;
  ScopedSpan span(exchange_.trace, core_->clock, span_, Span::Kind::kClient);
  if (span.recorded()) span.set("server.address", core_->endpoint(worker).text());
  if (span.recorded()) head.headers.set("traceparent", exchange_.trace->traceparent());
  const std::array<std::string_view, 1> parts = {body};
  net::RequestDeadlines deadlines;
  const RouterOptions& options = exchange_.options();
  deadlines.head_ms = exchange_.scan.stream ? options.prefill_deadline_ms : options.decode_deadline_ms;
  deadlines.read_ms = options.idle_deadline_ms;
  auto response = co_await exchange_.loop.client.send(core_->endpoint(worker), std::move(head), parts,
                                                      std::move(cancel), deadlines);
  if (!response) co_return co_await after_transport_error(worker, std::move(response).error());
  const net::ResponseHead& got = (*response)->head();
  core_->worker_answered(worker, got.status);
  if (exchange_.settings->retry_on.contains(got.status)) {
    if (core_->fleet.role(worker) == Role::kDecode) note_busy(*core_, worker, got);
    co_await read_failure(**response, exchange_.id, failure_);
    co_return false;
  }
  const std::string_view* type = got.headers.find("Content-Type");
  if (type != nullptr && type->starts_with("text/event-stream")) co_return co_await relay_events(**response, worker);
  co_return co_await relay_whole(**response, worker);
}

net::Task<bool> WholeLeg::relay_events(net::ClientResponse& response, fleet::WorkerId worker) {
  RelaySource source(response, exchange_.writer, exchange_.has_end_mark());
  Result<Piece> first = co_await source.next();
  if (!first) co_return co_await after_transport_error(worker, std::move(first).error());
  if (guard_ != nullptr) guard_->answered();
  const bool started = co_await exchange_.start_stream(to_client(response.take_headers(), exchange_.id));
  if (!started) {
    exchange_.cancelled();
    co_return true;
  }
  if (changed_body_ != nullptr) {
    exchange_.scan.prompt = {};
    exchange_.scan.preamble = {};
    std::string().swap(exchange_.joined_prompt);
    std::string().swap(exchange_.request.body);  // an assignment would keep its memory
    std::string().swap(*changed_body_);
    exchange_.request.head.headers = net::Headers();
  }
  RelayResult result = co_await relay_stream(source, *first, exchange_.writer, exchange_.measure(*core_));
  switch (result.end) {
    case RelayEnd::kComplete:
      core_->worker_completed(worker);
      exchange_.outcome = Outcome::kOk;
      break;
    case RelayEnd::kClientGone: exchange_.cancelled(); break;
    case RelayEnd::kCut: co_await cut_off(*core_, exchange_, worker, who_, result.error); break;
  }
  co_return true;
}

net::Task<bool> WholeLeg::relay_whole(net::ClientResponse& response, fleet::WorkerId worker) {
  if (guard_ != nullptr) guard_->answered();
  const size_t limit_bytes = exchange_.options().answer_bytes;
  Result<std::string> body = std::string();
  if (std::optional<std::string> all = response.all_now(limit_bytes)) body = *std::move(all);
  else body = co_await response.read_all(limit_bytes);
  if (!body) co_return co_await after_transport_error(worker, std::move(body).error());
  const int status = response.head().status;
  if (status < 500) core_->worker_completed(worker);
  if (exchange_.notes.watched) exchange_.notes.usage = usage_in(*body);
  co_await exchange_.relay(status, to_client(response.take_headers(), exchange_.id), *std::move(body));
  co_return true;
}

net::Task<bool> WholeLeg::after_transport_error(fleet::WorkerId worker, Error error) {
  if (exchange_.client_gone()) {
    exchange_.cancelled();
    co_return true;
  }
  if (error.code == ErrorCode::kCancelled) co_return false;  // by its sibling
  core_->log.warn("{}: request {}: {}", core_->endpoint(worker).url(), exchange_.id, error.message);
  failure_ = transport_failure(*core_, worker, who_, error);
  if (worth_retrying(error)) co_return false;
  co_await exchange_.fail(std::move(failure_));
  co_return true;
}

}  // namespace kindred::router
