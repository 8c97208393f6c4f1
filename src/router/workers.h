// POST /workers and DELETE /workers: the fleet changes while the router runs (docs/router.md).
//
// Thread-safety: called on the request's own loop; what it does to the fleet runs on the control loop.
#pragma once

#include "router/core.h"
#include "router/exchange.h"

namespace kindred::router {

// Answers the request if its path is /workers; else returns false.
net::Task<bool> answer_workers(CorePtr core, Exchange& exchange);

}  // namespace kindred::router
