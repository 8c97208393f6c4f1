#include "router/decide.h"

#include "router/leg_load.h"
#include "router/prefixes.h"

namespace kindred::router {
namespace {

std::optional<fleet::WorkerId> choose_whole_worker(Core& core, const Exchange& exchange, Role role,
                                                   std::span<const fleet::WorkerId> exclude, DecisionRecord& record) {
  const MonotonicTime begun = core.clock.now();
  const fleet::Ask ask = ask_of(exchange, whole_load(exchange.scan), exclude);
  const auto choice =
      fleet::choose_whole(core.fleet, *exchange.settings->prefill_policy, *exchange.settings->plain_policy, role, ask);
  if (!choice) return std::nullopt;
  const fleet::Snapshot& snapshot = choice->snapshot;
  const policy::Decision& decision = choice->decision;
  sent_to(core, exchange, choice->worker, /*computes=*/true);
  record.decode_worker = choice->worker;
  record.policy = decision.policy;
  record.reason = policy::to_string(decision.reason);
  record.fallback = policy::to_string(decision.fallback);
  if (decision.shadow) record.shadow_worker = snapshot.ids[*decision.shadow];
  for (const uint32_t at : decision.candidates) record.candidates.push_back(snapshot.ids[at]);
  record.decision_s = seconds_between(begun, core.clock.now());
  core.metrics.decode_decision_s.observe(record.decision_s);
  core.metrics.fell_back(decision.fallback);
  return choice->worker;
}

}  // namespace

fleet::Ask ask_of(const Exchange& exchange, fleet::LegLoad load, std::span<const fleet::WorkerId> exclude) {
  return {.model = exchange.model,
          .prompt_tokens = exchange.prefix.prompt_tokens,
          .held = exchange.prefix.held_tokens,
          .exclude = exclude,
          .load = load,
          .key = exchange.prompt(),
          .label = exchange.label};
}

std::optional<DecodeChoice> decide_decode(Core& core, Exchange& exchange, const DecodeAsk& ask) {
  ScopedSpan span(exchange.trace, core.clock, "decision", Span::Kind::kInternal);
  const MonotonicTime begun = core.clock.now();
  fleet::Ask asked = ask_of(exchange, ask.load, ask.exclude);
  asked.fingerprint = ask.fingerprint;
  asked.counts = ask.counts;
  asked.dialect = ask.dialect;
  const std::shared_ptr<const expert::CohortModel> cohorts = core.cohorts();
  const auto choice =
      fleet::choose_decode(core.fleet, core.room, *exchange.settings->decode_policy, cohorts.get(), asked);
  if (!choice) return std::nullopt;
  const fleet::Snapshot& snapshot = choice->snapshot;
  const policy::Decision* decision = &choice->decision;
  sent_to(core, exchange, snapshot.ids[decision->worker], /*computes=*/!ask.prefill);
  DecisionRecord out;
  out.decision_s = seconds_between(begun, core.clock.now());
  core.metrics.decode_decision_s.observe(out.decision_s);
  core.metrics.fell_back(decision->fallback);
  out.request_id = exchange.id;
  out.unix_s = core.clock.unix_seconds();
  out.model = exchange.model;
  if (ask.prefill) note_prefill(*ask.prefill, out);
  out.decode_worker = snapshot.ids[decision->worker];
  out.policy = decision->policy;
  out.reason = policy::to_string(decision->reason);
  out.fallback = policy::to_string(decision->fallback);
  out.prompt_tokens = ask.prompt_tokens;
  out.known_share = ask.known_share;
  if (decision->shadow) out.shadow_worker = snapshot.ids[*decision->shadow];
  for (const uint32_t at : decision->candidates) out.candidates.push_back(snapshot.ids[at]);
  for (size_t i = 0; i < decision->scores.size() && i < snapshot.ids.size(); ++i) {
    if (decision->scores[i] > policy::kNoScore) out.scores.emplace_back(snapshot.ids[i], decision->scores[i]);
  }
  if (decision->reason == policy::Reason::kBand && decision->worker < decision->scores.size()) {
    out.similarity = decision->scores[decision->worker];
    out.band_size = decision->candidates.size();
    core.metrics.similarity.observe(*out.similarity);
    core.metrics.band_size.observe(static_cast<double>(decision->candidates.size()));
  }
  exchange.notes.decode_worker = core.endpoint(out.decode_worker).url();
  exchange.notes.policy = out.policy;
  exchange.notes.reason = out.reason;
  span.set("kindred.policy", std::string(out.policy));
  span.set("kindred.reason", std::string(out.reason));
  core.decisions.add(std::move(out));
  return DecodeChoice{.worker = choice->worker, .inclusion = decision->inclusion};
}

void note_prefill(const PromptTarget& prefill, DecisionRecord& record) {
  record.prefill_worker = prefill.worker;
  record.prefill_reason = policy::to_string(prefill.reason);
  if (!prefill.rank) return;
  record.rank = prefill.rank;
  record.prefill_tokens = static_cast<uint64_t>(prefill.prefill_tokens);
}

std::optional<PromptTarget> decide_prefill(Core& core, Exchange& exchange, fleet::Dialect dialect,
                                           std::span<const fleet::WorkerId> exclude) {
  const fleet::LegLoad load = prefill_load(exchange.scan);
  if (exchange.settings->engine_policy) {
    const auto target = decide_engine(core, exchange, Role::kPrefill, dialect, exclude, load);
    if (target && exchange.notes.watched) exchange.notes.prefill_worker = core.endpoint(target->worker).url();
    return target;
  }
  const MonotonicTime begun = core.clock.now();
  fleet::Ask ask = ask_of(exchange, load, exclude);
  ask.dialect = dialect;
  const auto choice = fleet::choose_prefill(core.fleet, *exchange.settings->prefill_policy, ask);
  if (!choice) return std::nullopt;
  sent_to(core, exchange, choice->worker, /*computes=*/true);
  core.metrics.prefill_decision_s.observe(seconds_between(begun, core.clock.now()));
  if (exchange.notes.watched) exchange.notes.prefill_worker = core.endpoint(choice->worker).url();
  return PromptTarget{.worker = choice->worker,
                      .reason = choice->decision.reason,
                      .prefill_tokens = static_cast<double>(prompt_tokens_of(exchange.scan))};
}

std::optional<PromptTarget> decide_whole(Core& core, Exchange& exchange, Role role, bool by_engine,
                                         std::span<const fleet::WorkerId> exclude) {
  const ScopedSpan span(exchange.trace, core.clock, "decision", Span::Kind::kInternal);
  DecisionRecord record;
  record.request_id = exchange.id;
  record.unix_s = core.clock.unix_seconds();
  record.model = exchange.model;
  std::optional<PromptTarget> out;
  if (by_engine) {
    out = decide_engine(core, exchange, role, std::nullopt, exclude, whole_load(exchange.scan), &record);
  } else if (const auto worker = choose_whole_worker(core, exchange, role, exclude, record)) {
    out = {.worker = *worker, .prefill_tokens = static_cast<double>(prompt_tokens_of(exchange.scan))};
  }
  if (!out) return out;
  if (exchange.notes.watched) {
    exchange.notes.decode_worker = core.endpoint(out->worker).url();
    exchange.notes.policy = record.policy;
    exchange.notes.reason = record.reason;
  }
  core.decisions.add(std::move(record));
  return out;
}

}  // namespace kindred::router
