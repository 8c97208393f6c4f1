#include "router/status_engines.h"

#include <cmath>

#include "policy/engine_policy.h"

namespace kindred::router {
namespace {

Json terms_json(const policy::Pressure& pressure) {
  return {{"remaining", pressure.remaining},
          {"waiting", pressure.waiting},
          {"compensation", pressure.compensation},
          {"kv", pressure.kv},
          {"experts", pressure.experts}};
}

Json constants_json(const policy::EnginePolicyOptions& options) {
  const policy::PressureOptions& pressure = options.pressure;
  return {{"kv_high", pressure.kv_high},
          {"kv_gap", pressure.kv_gap},
          {"kv_weight", pressure.kv_weight},
          {"expert_weight", pressure.expert_weight},
          {"epsilon_tokens", pressure.epsilon_tokens},
          {"epsilon_share", pressure.epsilon_share},
          {"clients", options.clients},
          {"tie_break", options.tie_break}};
}

// Of the last decision: what each engine looked like, its score in the policy's own unit, and who was in question.
Json explain_json(const Core& core, const policy::PressureOptions& options) {
  const auto last = core.last_engine.get();
  if (!last) return nullptr;
  const fleet::EngineSnapshot& snapshot = last->snapshot;
  const policy::Decision& decision = last->decision;
  const double expert_mean = policy::mean_expert_pressure(snapshot.views);
  Json engines = Json::array();
  for (size_t i = 0; i < snapshot.engines.size(); ++i) {
    const policy::EngineView& view = snapshot.views[i];
    const bool scored = i < decision.scores.size() && std::isfinite(decision.scores[i]);
    Json engine = {{"worker", core.endpoint(snapshot.engines[i].worker).url()},
                   {"rank", snapshot.engines[i].rank},
                   {"available", view.available},
                   {"trace", policy::to_string(view.trace)},
                   {"held_tokens", view.held_tokens},
                   {"score", scored ? Json(decision.scores[i]) : Json(nullptr)}};
    if (view.trace == policy::TraceState::kFresh) {
      engine["terms"] = terms_json(policy::pressure_of(view, expert_mean, options));
    }
    engines.push_back(std::move(engine));
  }
  Json candidates = Json::array();
  for (const uint32_t at : decision.candidates) candidates.push_back(at);
  return {{"policy", decision.policy},
          {"reason", policy::to_string(decision.reason)},
          {"fallback", policy::to_string(decision.fallback)},
          {"worker", core.endpoint(last->engine.worker).url()},
          {"rank", last->engine.rank},
          {"prefill_tokens", last->prefill_tokens},
          {"candidates", std::move(candidates)},
          {"engines", std::move(engines)}};
}

}  // namespace

bool looks_at_engines(const RouterOptions& options) {
  return options.engines.on || options.load == fleet::LoadSource::kPressure;
}

Json engines_json(const fleet::WorkerStatus& worker) {
  Json out = Json::array();
  for (const fleet::EngineStatus& engine : worker.engines) {
    const policy::EngineView& view = engine.view;
    Json one = {{"rank", engine.rank},
                {"trace", policy::to_string(engine.trace)},
                {"trace_age_s", engine.trace_age_s >= 0 ? Json(engine.trace_age_s) : Json(nullptr)},
                {"pushed", engine.pushed},
                {"sequence", engine.sequence},
                {"in_flight", view.in_flight},
                {"compensation_tokens", view.compensation_tokens},
                {"skew_s", engine.skew_s ? Json(*engine.skew_s) : Json(nullptr)}};
    // Of a trace that is not fresh nothing is said: it is not known, which is not zero.
    if (engine.trace == policy::TraceState::kFresh) {
      one["running"] = view.running;
      one["waiting"] = view.waiting;
      one["remaining_prefill_tokens"] = view.remaining_prefill_tokens;
      one["waiting_prefill_tokens"] = view.waiting_prefill_tokens;
      one["kv_usage"] = view.kv_usage;
      one["expert_pressure"] = view.expert_pressure;
      one["score"] = engine.pressure.score();
      one["terms"] = terms_json(engine.pressure);
    }
    out.push_back(std::move(one));
  }
  return out;
}

Json engine_policy_json(const Core& core) {
  const SettingsPtr settings = core.settings();
  if (!settings->engine_policy) return nullptr;
  const policy::EnginePolicyOptions& options = settings->options.engines.policy;
  const TraceFeedStatus feed = core.traces.status();
  return {{"name", options.name},
          {"constants", constants_json(options)},
          {"explain", explain_json(core, options.pressure)},
          {"traces",
           {{"subscriptions", feed.subscriptions},
            {"taken", feed.traces},
            {"ignored", feed.ignored},
            {"errors", feed.errors}}}};
}

std::string trace_metrics(const Core& core) {
  Registry registry;
  const TraceFeedStatus feed = core.traces.status();
  const auto count = [&](std::string_view name, std::string_view help, uint64_t value) {
    registry.counter(name, help).add(static_cast<double>(value));
  };
  count("kindred_router_traces_total", "Traces of engines that were taken in.", feed.traces);
  count("kindred_router_traces_ignored_total", "Traces that were older than what was known, or of no engine.",
        feed.ignored);
  count("kindred_router_trace_errors_total", "Messages of publishers that are no traces.", feed.errors);
  for (const fleet::WorkerStatus& worker : core.fleet.status()) {
    if (worker.description.dialect != fleet::Dialect::kVllm) continue;
    const TakesPriority takes = core.priorities.of(worker.id);
    for (const TakesPriority one : {TakesPriority::kUnknown, TakesPriority::kOn, TakesPriority::kOff}) {
      registry
          .gauge("kindred_router_worker_priority",
                 "1 for what a vLLM worker makes of priorities, as far as it was asked.",
                 {{"takes", std::string(to_string(one))}, {"worker", worker.spec.url}})
          .set(takes == one ? 1 : 0);
    }
  }
  return registry.render();
}

}  // namespace kindred::router
