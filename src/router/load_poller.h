// Asks each worker that is up for its own view of its load and its engines', once per interval: /metrics, or /v1/loads
// on SGLang and kindred workers. What cannot be had is not reported, and so grows old in the fleet.
//
// Thread-safety: confined to the control loop (router/core.h).
#pragma once

#include "router/core.h"

namespace kindred::router {

// Starts the background task of one worker, unless polling is off (load_interval_ms 0). False: the router is
// closing or too busy.
bool start_polling(const CorePtr& core, fleet::WorkerId worker);

}  // namespace kindred::router
