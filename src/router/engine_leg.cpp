#include "router/engine_leg.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "base/bytes.h"
#include "fleet/engine_trace.h"
#include "router/decide.h"
#include "router/headers.h"
#include "router/leg_load.h"
#include "router/prefixes.h"
#include "router/splice.h"

namespace kindred::router {

std::optional<PromptTarget> decide_engine(Core& core, const Exchange& exchange, Role role,
                                          std::optional<fleet::Dialect> dialect,
                                          std::span<const fleet::WorkerId> exclude, fleet::LegLoad load,
                                          DecisionRecord* record) {
  const MonotonicTime begun = core.clock.now();
  fleet::Ask ask = ask_of(exchange, load, exclude);
  ask.dialect = dialect;
  if (ask.prompt_tokens <= 0) {
    // Embeddings and their like have no prompt, but something to read all the same.
    const std::string& body = exchange.request.body;
    const auto counted = prompt_tokens_of(exchange.scan, exchange.prompt().empty() ? body.size() / kBytesPerToken : 0);
    ask.prompt_tokens = static_cast<double>(counted);
  }
  auto choice = fleet::choose_engine(core.fleet, *exchange.settings->engine_policy, role, ask);
  if (!choice) return std::nullopt;
  const auto same = [&](const fleet::EngineRef& other) { return other.worker == choice->engine.worker; };
  const PromptTarget out = {
      .worker = choice->engine.worker,
      .reason = choice->decision.reason,
      .rank = choice->engine.rank,
      .engines = static_cast<size_t>(std::ranges::count_if(choice->snapshot.engines, same)),
      .prefill_tokens = choice->prefill_tokens,
  };
  sent_to(core, exchange, out.worker, /*computes=*/true);
  const double took_s = seconds_between(begun, core.clock.now());
  (role == Role::kPrefill ? core.metrics.prefill_decision_s : core.metrics.decode_decision_s).observe(took_s);
  core.metrics.engine_decided(out.reason);
  core.metrics.fell_back(choice->decision.fallback);
  if (record != nullptr) {
    record->decision_s = took_s;
    note_decision(*choice, *record);
  }
  core.last_engine.set(std::make_shared<const fleet::EngineChoice>(*std::move(choice)));
  return out;
}

void note_decision(const fleet::EngineChoice& choice, DecisionRecord& record) {
  record.decode_worker = choice.engine.worker;
  record.rank = choice.engine.rank;
  record.prefill_tokens = static_cast<uint64_t>(choice.prefill_tokens);
  record.policy = choice.decision.policy;
  record.reason = policy::to_string(choice.decision.reason);
  record.fallback = policy::to_string(choice.decision.fallback);
  for (const uint32_t at : choice.decision.candidates) {
    const fleet::WorkerId worker = choice.snapshot.engines[at].worker;
    if (record.candidates.empty() || record.candidates.back() != worker) record.candidates.push_back(worker);
  }
}

fleet::LoadGuard take(Core& core, const PromptTarget& target, fleet::LegLoad load) {
  if (!target.rank) return core.fleet.take(target.worker, load);
  return core.fleet.take(fleet::EngineRef{target.worker, *target.rank}, load,
                         static_cast<int64_t>(target.prefill_tokens));
}

void add_engine_headers(const Core& core, const PromptTarget& target, const fleet::LoadGuard& guard,
                        net::RequestHead& head) {
  if (!target.rank) return;
  const fleet::Dialect dialect = core.fleet.dialect(target.worker);
  if (dialect == fleet::Dialect::kKindred && guard.dispatch() != 0) {
    head.headers.set(fleet::kDispatchHeader, hex64(guard.dispatch()));
  }
  const bool by_header = dialect == fleet::Dialect::kKindred || dialect == fleet::Dialect::kVllm;
  if (by_header && target.pinned()) head.headers.set(kRankHeader, fmt::to_string(*target.rank));
}

std::optional<std::string> named_xargs(const Core& core, const PromptTarget& target, const fleet::LoadGuard& guard,
                                       std::string_view body) {
  if (!target.rank || guard.dispatch() == 0) return std::nullopt;
  if (core.fleet.dialect(target.worker) != fleet::Dialect::kVllm) return std::nullopt;
  if (!core.fleet.pushes_traces({.worker = target.worker, .rank = *target.rank})) return std::nullopt;
  const std::string name = fmt::format(R"("{}")", hex64(guard.dispatch()));
  const Result<std::optional<std::string_view>> own = raw_field(body, kXargs);
  if (!own) return std::nullopt;
  const std::string_view args = *own && **own != "null" ? **own : "{}";
  Result<std::string> named = splice(args, {{fleet::kDispatchArg, name}});
  if (!named) return std::nullopt;
  return *std::move(named);
}

Result<std::optional<std::string>> engine_body(const Core& core, const Exchange& exchange, const PromptTarget& target,
                                               const fleet::LoadGuard& guard, std::string_view body) {
  if (!exchange.completes()) return std::optional<std::string>();  // of other jobs the fields are not known
  std::vector<Edit> edits;
  std::string priority, rank;
  if (const auto number = leg_priority(core, exchange, target.worker, target.prefill_tokens)) {
    priority = fmt::to_string(*number);
    edits.push_back({"priority", priority});
  }
  if (target.pinned() && core.fleet.dialect(target.worker) == fleet::Dialect::kSglang) {
    rank = fmt::to_string(*target.rank);
    edits.push_back({fleet::sglang_rank_field(core.fleet.description(target.worker).version), rank});
  }
  const std::optional<std::string> xargs = named_xargs(core, target, guard, body);
  if (xargs) edits.push_back({kXargs, *xargs});
  if (edits.empty()) return std::optional<std::string>();
  Result<std::string> changed = splice(body, edits);
  if (!changed) return std::move(changed).error();
  return std::optional<std::string>(*std::move(changed));
}

}  // namespace kindred::router
