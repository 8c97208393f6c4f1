// What /status and /metrics say of engines and of the policy that chooses between them.
//
// Thread-safety: any thread.
#pragma once

#include <string>

#include "base/json.h"
#include "router/core.h"

namespace kindred::router {

// Whether anybody goes by engines: a policy for them, or the load `pressure`.
bool looks_at_engines(const RouterOptions& options);

Json engines_json(const fleet::WorkerStatus& worker);

// The policy, its constants, and its last decision with all that it was made on; null without a policy.
Json engine_policy_json(const Core& core);

// kindred_router_trace_* and kindred_router_worker_priority, as text.
std::string trace_metrics(const Core& core);

}  // namespace kindred::router
