// What the router says of itself: models, readiness, metrics, status.
//
// Thread-safety: the answers run on the request's own loop; status_json() is confined to the control loop.
#pragma once

#include <string>
#include <string_view>

#include "router/core.h"
#include "router/exchange.h"

namespace kindred::router {

// GET /status: workers, policy, cohorts and the last `decisions` decisions, newest first. Nothing of
// any prompt or output, and no counts.
std::string status_json(const Core& core, size_t decisions);

// Each answers the request if its path is one of its own; else it returns false.
net::Task<bool> answer_open(Core& core, Exchange& exchange);   // /health, /ready, /v1/models: for everybody
net::Task<bool> answer_admin(Core& core, Exchange& exchange);  // /metrics, /status, /experiment: for operators

}  // namespace kindred::router
