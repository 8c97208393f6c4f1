#include "router/plain_flow.h"

#include <fmt/format.h>

#include "router/decide.h"
#include "router/leg_load.h"
#include "router/prefixes.h"
#include "router/whole_leg.h"

namespace kindred::router {
PlainFlow::PlainFlow(CorePtr core, Exchange& exchange, Role role)
    : core_(std::move(core)),
      exchange_(exchange),
      role_(role),
      by_engine_(exchange.settings->engine_policy && role == Role::kBoth &&
                 !exchange.request.head.path().ends_with("tokenize")) {}

net::Task<void> PlainFlow::run() {
  std::optional<LegFailure> failure;
  WholeLeg leg(core_, exchange_, "the worker", "worker");
  leg.forget_body_in_streams(changed_body_);
  for (uint32_t attempt = 0; attempt <= exchange_.options().retries; ++attempt) {
    const std::optional<PromptTarget> target = choose();
    if (!target) break;
    if (attempt > 0) core_->metrics.retried("plain");
    tried_.push_back(target->worker);
    fleet::LoadGuard guard = take(*core_, *target, whole_load(exchange_.scan));
    Result<std::optional<std::string>> changed = engine_body(*core_, exchange_, *target, guard, exchange_.request.body);
    if (!changed) {  // the scanner refuses what cannot be spliced; if ever not, the request fails and not the router
      failure.emplace().error = api_error(changed.error());
      break;
    }
    const bool differs = changed->has_value();
    changed_body_ = std::move(*changed).value_or(std::string());
    const std::string_view body = differs ? changed_body_ : exchange_.request.body;
    net::RequestHead head = worker_head(exchange_);
    add_engine_headers(*core_, *target, guard, head);
    const bool done = co_await leg.run(target->worker, std::move(head), body, exchange_.request.cancel, &guard);
    if (done) co_return;
    failure = std::move(leg.failure());
  }
  if (!failure) failure.emplace().error = no_worker(fmt::format("no worker that serves '{}' is up", exchange_.model));
  co_await exchange_.fail(*std::move(failure));
}

std::optional<PromptTarget> PlainFlow::choose() {
  const ScopedSpan span(exchange_.trace, core_->clock, "decision", Span::Kind::kInternal);
  DecisionRecord record;
  record.request_id = exchange_.id;
  record.unix_s = core_->clock.unix_seconds();
  record.model = exchange_.model;
  std::optional<PromptTarget> out;
  if (by_engine_) {
    const fleet::LegLoad load = whole_load(exchange_.scan);
    out = decide_engine(*core_, exchange_, role_, std::nullopt, tried_, load, &record);
  } else if (const auto worker = choose_worker(record)) {
    out = {.worker = *worker, .prefill_tokens = static_cast<double>(prompt_tokens_of(exchange_.scan))};
  }
  if (!out) return out;
  if (exchange_.notes.watched) {
    exchange_.notes.decode_worker = core_->endpoint(out->worker).url();
    exchange_.notes.policy = record.policy;
    exchange_.notes.reason = record.reason;
  }
  core_->decisions.add(std::move(record));
  return out;
}

std::optional<fleet::WorkerId> PlainFlow::choose_worker(DecisionRecord& record) {
  const MonotonicTime begun = core_->clock.now();
  const fleet::Ask ask = ask_of(exchange_, whole_load(exchange_.scan), tried_);
  const auto choice = fleet::choose_whole(core_->fleet, *exchange_.settings->prefill_policy,
                                          *exchange_.settings->plain_policy, role_, ask);
  if (!choice) return std::nullopt;
  const fleet::Snapshot& snapshot = choice->snapshot;
  const policy::Decision& decision = choice->decision;
  sent_to(*core_, exchange_, choice->worker, /*computes=*/true);
  record.decode_worker = choice->worker;
  record.policy = decision.policy;
  record.reason = policy::to_string(decision.reason);
  record.fallback = policy::to_string(decision.fallback);
  if (decision.shadow) record.shadow_worker = snapshot.ids[*decision.shadow];
  for (const uint32_t at : decision.candidates) record.candidates.push_back(snapshot.ids[at]);
  record.decision_s = seconds_between(begun, core_->clock.now());
  core_->metrics.decode_decision_s.observe(record.decision_s);
  core_->metrics.fell_back(decision.fallback);
  return choice->worker;
}

}  // namespace kindred::router
