// What `kindred router` can be told of engines and of what they say of themselves (router/engine_leg.h).
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "policy/engine_policy.h"

namespace kindred::router {

enum class PriorityMode {
  kOff,
  kAuto,  // with an engine policy, on workers that take priorities
  kOn,    // on all vLLM workers
};

struct EngineOptions {
  bool on = false;                     // an engine policy dispatches; else prefill and decode policies do
  policy::EnginePolicyOptions policy;  // its pressure options count for the load `pressure`, too

  std::vector<std::string> traces;  // WORKER_URL=tcp://host:port, of workers that do not say so themselves
  std::chrono::milliseconds trace_max_age_ms{3'000}, trace_grace_ms{2'000};  // fleet::FleetOptions

  PriorityMode vllm_priority = PriorityMode::kAuto;
  double priority_ms_per_token = 1;  // of waiting that a token of prompt is worth
};

}  // namespace kindred::router
