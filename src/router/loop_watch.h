// Watches the router's own loops: how much later than asked a timer fires, which is how long everything else on that
// thread waits too.
//
// Thread-safety: to be called on the control loop before any other runs.
#pragma once

#include "router/core.h"

namespace kindred::router {

// Runs until the router closes.
void start_loop_watch(const CorePtr& core);

}  // namespace kindred::router
