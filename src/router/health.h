// GET /health and GET /ready: what the router can serve, for load balancers in front of it.
//
// Without a query, /health says that the process lives (200 unless it drains), as a liveness probe needs it:
// a router must not be restarted because its workers are away. /ready is 200 when some model can be served.
// With `?model=NAME` both answer for that model: 200, 503 with the reason, or 404.
//
// Thread-safety: any loop's thread.
#pragma once

#include <string>
#include <string_view>

#include "router/core.h"
#include "router/exchange.h"

namespace kindred::router {

// Why `model` (empty: any model) cannot be served now, or empty if it can.
std::string unserved_reason(const Core& core, std::string_view model);

// Answers the request if its path is one of the two; else returns false.
net::Task<bool> answer_health(Core& core, Exchange& exchange);

}  // namespace kindred::router
