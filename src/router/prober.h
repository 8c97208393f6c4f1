// Health checks and discovery: asks each worker GET /health and GET /v1/models once per interval and
// reports to the fleet.
//
// Thread-safety: confined to the control loop (router/core.h).
#pragma once

#include "router/core.h"

namespace kindred::router {

// Starts one background task per worker; Core::closing ends them, and a worker's removal its own.
void start_probing(const CorePtr& core);
// That of one worker which was added or restored. False: the router is closing or too busy.
bool start_probing(const CorePtr& core, fleet::WorkerId worker);

// One check, for the loop above and for tests.
net::Task<void> probe(Core& core, fleet::WorkerId worker);

}  // namespace kindred::router
