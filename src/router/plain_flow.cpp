#include "router/plain_flow.h"

#include <fmt/format.h>

#include "router/decide.h"
#include "router/leg_load.h"
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

std::optional<PromptTarget> PlainFlow::choose() { return decide_whole(*core_, exchange_, role_, by_engine_, tried_); }

}  // namespace kindred::router
