#include "router/plain_flow.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "policy/kv_aware.h"
#include "router/headers.h"
#include "router/leg_load.h"
#include "router/prefixes.h"

namespace kindred::router {
namespace {

constexpr std::string_view kWorker = "the worker";

}  // namespace

PlainFlow::PlainFlow(CorePtr core, Exchange& exchange, Role role)
    : core_(std::move(core)), exchange_(exchange), role_(role) {}

net::Task<void> PlainFlow::run() {
  failure_ = {.error = no_worker(fmt::format("no worker that serves '{}' is up", exchange_.model))};
  for (uint32_t attempt = 0; attempt <= core_->options.retries; ++attempt) {
    const std::optional<fleet::WorkerId> worker = choose();
    if (!worker) break;
    if (attempt > 0) core_->metrics.retried("plain");
    tried_.push_back(*worker);
    const fleet::LoadGuard guard = core_->fleet.take(*worker, whole_load(exchange_.scan));
    const bool done = co_await leg(*worker);
    if (done) co_return;
  }
  co_await exchange_.fail(std::move(failure_));
}

// A worker that does the whole request is a prefill worker, too, for the policy that looks at prefixes.
std::optional<policy::Decision> PlainFlow::decide(const fleet::Snapshot& snapshot) {
  if (core_->prefill_policy->name() == policy::kKvAwareName) {
    policy::PrefillRequest request = prefill_request(*core_, exchange_);
    request.load = core_->fleet.unit_of(whole_load(exchange_.scan));
    return core_->prefill_policy->choose({.workers = snapshot.views}, request);
  }
  const policy::DecodeRequest request = {.load = core_->fleet.unit_of(whole_load(exchange_.scan)),
                                         .label = exchange_.label,
                                         .prompt_tokens = exchange_.prefix.prompt_tokens};
  return core_->plain_policy->choose({.workers = snapshot.views}, request);
}

std::optional<fleet::WorkerId> PlainFlow::choose() {
  const ScopedSpan span(exchange_.trace, core_->clock, "decision", Span::Kind::kInternal);
  const MonotonicTime begun = core_->clock.now();
  fleet::Snapshot snapshot = core_->fleet.snapshot(
      {.role = role_, .model = exchange_.model, .exclude = tried_, .load = whole_load(exchange_.scan)});
  mark_held(*core_, exchange_, snapshot);
  const std::optional<policy::Decision> decision = decide(snapshot);
  if (!decision) return std::nullopt;
  sent_to(*core_, exchange_, snapshot.ids[decision->worker], /*computes=*/true);
  DecisionRecord out;
  out.request_id = exchange_.id;
  out.unix_s = core_->clock.unix_seconds();
  out.model = exchange_.model;
  out.decode_worker = snapshot.ids[decision->worker];
  out.policy = decision->policy;
  out.reason = policy::to_string(decision->reason);
  out.fallback = policy::to_string(decision->fallback);
  if (decision->shadow) out.shadow_worker = snapshot.ids[*decision->shadow];
  for (const uint32_t at : decision->candidates) out.candidates.push_back(snapshot.ids[at]);
  out.decision_s = seconds_between(begun, core_->clock.now());
  core_->metrics.decode_decision_s.observe(out.decision_s);
  core_->metrics.fell_back(decision->fallback);
  exchange_.notes.decode_worker = core_->endpoint(out.decode_worker).url();
  exchange_.notes.policy = out.policy;
  exchange_.notes.reason = out.reason;
  core_->decisions.add(std::move(out));
  return snapshot.ids[decision->worker];
}

net::Task<bool> PlainFlow::leg(fleet::WorkerId worker) {
  ScopedSpan span(exchange_.trace, core_->clock, "worker", Span::Kind::kClient);
  span.set("server.address", core_->endpoint(worker).text());
  net::RequestHead head = worker_head(exchange_);
  const std::array<std::string_view, 1> parts = {exchange_.request.body};
  net::RequestDeadlines deadlines;
  const RouterOptions& options = core_->options;
  deadlines.head_ms = exchange_.scan.stream ? options.prefill_deadline_ms : options.decode_deadline_ms;
  deadlines.read_ms = options.idle_deadline_ms;
  auto response =
      co_await core_->client.send(core_->endpoint(worker), std::move(head), parts, exchange_.request.cancel, deadlines);
  if (!response) co_return co_await after_transport_error(worker, std::move(response).error());
  const net::ResponseHead& got = (*response)->head();
  core_->worker_answered(worker, got.status);
  if (core_->retry_on.contains(got.status)) {
    failure_ = co_await read_answer(**response, exchange_.id);
    co_return false;
  }
  const std::string* type = got.headers.find("Content-Type");
  if (type != nullptr && type->starts_with("text/event-stream")) co_return co_await relay_events(**response, worker);
  co_return co_await relay_whole(**response, worker);
}

net::Task<bool> PlainFlow::relay_events(net::ClientResponse& response, fleet::WorkerId worker) {
  RelaySource source(response, exchange_.writer, exchange_.ends_with_done());
  Result<Piece> first = co_await source.next();
  if (!first) co_return co_await after_transport_error(worker, std::move(first).error());
  const bool started = co_await exchange_.start_stream(to_client(response.head().headers, exchange_.id));
  if (!started) {
    exchange_.cancelled();
    co_return true;
  }
  RelayResult result = co_await relay_stream(source, *first, exchange_.writer, exchange_.measure(*core_));
  switch (result.end) {
    case RelayEnd::kComplete:
      core_->worker_completed(worker);
      exchange_.outcome = Outcome::kOk;
      break;
    case RelayEnd::kClientGone: exchange_.cancelled(); break;
    case RelayEnd::kCut: {
      LegFailure failure = transport_failure(*core_, worker, kWorker, result.error);
      co_await exchange_.fail(std::move(failure));
      break;
    }
  }
  co_return true;
}

net::Task<bool> PlainFlow::relay_whole(net::ClientResponse& response, fleet::WorkerId worker) {
  Result<std::string> body = co_await response.read_all(core_->options.answer_bytes);
  if (!body) co_return co_await after_transport_error(worker, std::move(body).error());
  const net::ResponseHead& got = response.head();
  if (exchange_.notes.watched) exchange_.notes.usage = usage_in(*body);
  if (got.status < 500) core_->worker_completed(worker);
  co_await exchange_.relay(got.status, to_client(got.headers, exchange_.id), *std::move(body));
  co_return true;
}

net::Task<bool> PlainFlow::after_transport_error(fleet::WorkerId worker, Error error) {
  if (error.code == ErrorCode::kCancelled || exchange_.client_gone()) {
    exchange_.cancelled();
    co_return true;
  }
  core_->log.warn("{}: request {}: {}", core_->endpoint(worker).url(), exchange_.id, error.message);
  failure_ = transport_failure(*core_, worker, kWorker, error);
  if (worth_retrying(error)) co_return false;
  co_await exchange_.fail(std::move(failure_));
  co_return true;
}

}  // namespace kindred::router
