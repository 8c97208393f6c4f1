#include "cli/router_engines.h"

#include <chrono>

#include "cli/router_limits.h"

namespace kindred::cli {

void EngineArguments::add_to(ConfigSchema& schema) {
  // Not `replay`: nobody has assigned live requests beforehand.
  std::vector<std::string> policies = {"none"};
  for (const std::string_view name : policy::engine_policy_names()) {
    if (name != "replay") policies.emplace_back(name);
  }
  constexpr double kMost = 1e12;
  schema.choice("engine_policy", &engine_policy, std::move(policies),
                "which data-parallel engine runs a prompt, in place of prefill_policy; see docs/router.md");
  schema.real("pressure_kv_high", &pressure.kv_high, 1e-6, 1,
              "pressure: share of KV above which the emptiest is taken");
  schema.real("pressure_kv_gap", &pressure.kv_gap, 1e-6, 1, "pressure: if the emptiest has so much less in use");
  schema.real("pressure_kv_weight", &pressure.kv_weight, 0, kMost, "pressure: tokens that a full KV is worth");
  schema.real("pressure_expert_weight", &pressure.expert_weight, 0, kMost,
              "pressure: tokens for each multiple of the mean expert pressure");
  schema.real("pressure_epsilon_tokens", &pressure.epsilon_tokens, 0, kMost, "pressure: closer scores are equal");
  schema.real("pressure_epsilon_share", &pressure.epsilon_share, 0, 1, "pressure: the same, of the mean score");
  schema.integer("engine_clients", &engine_clients, 1, 1'000'000,
                 "vllm-*: routers and front ends that share the engines");
  schema.list("traces", &traces,
              "where a worker publishes its engines' traces, if it does not say so itself: "
              "WORKER_URL=tcp://host:port");
  schema.integer("trace_max_age_ms", &trace_max_age_ms, 10, kDayMs, "an older trace is late");
  schema.integer("trace_grace_ms", &trace_grace_ms, 0, kDayMs, "and after this long unknown");
  schema.choice("vllm_priority", &vllm_priority, {"off", "auto", "on"},
                "vLLM's priority by arrival and length; auto: with an engine policy, where the server takes it");
  schema.real("priority_ms_per_token", &priority_ms_per_token, 0, 1e6, "of waiting that a token of prompt is worth");
}

void EngineArguments::apply(router::RouterOptions& out) const {
  router::EngineOptions& engines = out.engines;
  engines.on = engine_policy != "none";
  if (engines.on) engines.policy.name = engine_policy;
  engines.policy.pressure = pressure;
  engines.policy.clients = static_cast<double>(engine_clients);
  engines.policy.tie_break = out.prefill_policy.tie_break;
  engines.policy.seed = out.prefill_policy.seed;
  engines.traces = traces;
  engines.trace_max_age_ms = std::chrono::milliseconds(trace_max_age_ms);
  engines.trace_grace_ms = std::chrono::milliseconds(trace_grace_ms);
  engines.vllm_priority = vllm_priority == "off"  ? router::PriorityMode::kOff
                          : vllm_priority == "on" ? router::PriorityMode::kOn
                                                  : router::PriorityMode::kAuto;
  engines.priority_ms_per_token = priority_ms_per_token;
}

}  // namespace kindred::cli
