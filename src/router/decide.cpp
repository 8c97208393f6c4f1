#include "router/decide.h"

#include "router/decode_room.h"
#include "router/leg_load.h"
#include "router/prefixes.h"

namespace kindred::router {

std::optional<fleet::WorkerId> decide_decode(Core& core, Exchange& exchange, const DecodeAsk& ask) {
  ScopedSpan span(exchange.trace, core.clock, "decision", Span::Kind::kInternal);
  const MonotonicTime begun = core.clock.now();
  fleet::Snapshot snapshot = core.fleet.snapshot({.role = Role::kDecode,
                                                  .model = exchange.model,
                                                  .fingerprint = ask.fingerprint,
                                                  .exclude = ask.exclude,
                                                  .load = ask.load});
  mark_held(core, exchange, snapshot);
  leave_out_full(core.room, snapshot);
  const policy::DecodeRequest request = {.counts = ask.counts,
                                         .model_fingerprint = ask.fingerprint,
                                         .load = core.fleet.unit_of(ask.load),
                                         .label = exchange.label,
                                         .prompt_tokens = exchange.prefix.prompt_tokens};
  const std::shared_ptr<const expert::CohortModel> cohorts = core.cohorts;
  const auto decision = core.decode_policy->choose({.workers = snapshot.views, .cohorts = cohorts.get()}, request);
  if (!decision) return std::nullopt;
  sent_to(core, exchange, snapshot.ids[decision->worker], /*computes=*/false);
  DecisionRecord out;
  out.decision_s = seconds_between(begun, core.clock.now());
  core.metrics.decode_decision_s.observe(out.decision_s);
  core.metrics.fell_back(decision->fallback);
  out.request_id = exchange.id;
  out.unix_s = core.clock.unix_seconds();
  out.model = exchange.model;
  out.prefill_worker = ask.prefill_worker;
  out.prefill_reason = policy::to_string(ask.prefill_reason);
  out.decode_worker = snapshot.ids[decision->worker];
  out.policy = decision->policy;
  out.reason = policy::to_string(decision->reason);
  out.fallback = policy::to_string(decision->fallback);
  out.prompt_tokens = ask.prompt_tokens;
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
  return snapshot.ids[decision->worker];
}

std::optional<PrefillChoice> decide_prefill(Core& core, Exchange& exchange, fleet::Dialect dialect,
                                            std::span<const fleet::WorkerId> exclude) {
  const MonotonicTime begun = core.clock.now();
  fleet::Snapshot snapshot = core.fleet.snapshot({.role = Role::kPrefill,
                                                  .model = exchange.model,
                                                  .paired = true,
                                                  .exclude = exclude,
                                                  .load = prefill_load(exchange.scan),
                                                  .dialect = dialect});
  mark_held(core, exchange, snapshot);
  const auto decision = core.prefill_policy->choose({.workers = snapshot.views}, prefill_request(core, exchange));
  if (!decision) return std::nullopt;
  sent_to(core, exchange, snapshot.ids[decision->worker], /*computes=*/true);
  core.metrics.prefill_decision_s.observe(seconds_between(begun, core.clock.now()));
  exchange.notes.prefill_worker = core.endpoint(snapshot.ids[decision->worker]).url();
  return PrefillChoice{snapshot.ids[decision->worker], decision->reason};
}

}  // namespace kindred::router
