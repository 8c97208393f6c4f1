// Watches the router's own loop: how much later than asked a timer fires, which is how long everything else
// waits too.
#pragma once

#include "router/core.h"

namespace kindred::router {

// Runs until the router closes.
void start_loop_watch(CorePtr core);

}  // namespace kindred::router
