#include "router/plain_flow.h"

#include <fmt/format.h>

#include "router/decide.h"
#include "router/leg_load.h"
#include "router/prefixes.h"
#include "router/whole_leg.h"

namespace kindred::router {
PlainFlow::PlainFlow(CorePtr core, Exchange& exchange, Role role)
    : core_(std::move(core)), exchange_(exchange), role_(role) {}

net::Task<void> PlainFlow::run() {
  LegFailure failure = {.error = no_worker(fmt::format("no worker that serves '{}' is up", exchange_.model))};
  WholeLeg leg(core_, exchange_, "the worker", "worker");
  for (uint32_t attempt = 0; attempt <= exchange_.options().retries; ++attempt) {
    const std::optional<fleet::WorkerId> worker = choose();
    if (!worker) break;
    if (attempt > 0) core_->metrics.retried("plain");
    tried_.push_back(*worker);
    const fleet::LoadGuard guard = core_->fleet.take(*worker, whole_load(exchange_.scan));
    net::RequestHead head = worker_head(exchange_);
    const bool done = co_await leg.run(*worker, std::move(head), exchange_.request.body, exchange_.request.cancel);
    if (done) co_return;
    failure = std::move(leg.failure());
  }
  co_await exchange_.fail(std::move(failure));
}

std::optional<fleet::WorkerId> PlainFlow::choose() {
  const ScopedSpan span(exchange_.trace, core_->clock, "decision", Span::Kind::kInternal);
  const MonotonicTime begun = core_->clock.now();
  const fleet::Ask ask = ask_of(exchange_, whole_load(exchange_.scan), tried_);
  const auto choice = fleet::choose_whole(core_->fleet, *exchange_.settings->prefill_policy,
                                          *exchange_.settings->plain_policy, role_, ask);
  if (!choice) return std::nullopt;
  const fleet::Snapshot& snapshot = choice->snapshot;
  const policy::Decision* decision = &choice->decision;
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

}  // namespace kindred::router
