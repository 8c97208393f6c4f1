// Health checks and discovery: asks each worker GET /health and GET /v1/models once per interval and
// reports to the fleet.
//
// Thread-safety: confined to the io_context's thread.
#pragma once

#include "router/core.h"

namespace kindred::router {

// Starts one background task per worker; Core::closing ends them.
void start_probing(const CorePtr& core);

// One check, for the loop above and for tests.
net::Task<void> probe(Core& core, fleet::WorkerId worker);

}  // namespace kindred::router
