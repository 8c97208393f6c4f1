// Room in the decode pool of a request's model, known before its prompt is run (fleet/room.h).
//
// Thread-safety: each request on the thread of its own loop; what they share is behind locks (fleet/room.h).
#pragma once

#include <optional>

#include "router/exchange.h"

namespace kindred::router {

// Nothing if there is room, which Exchange::decode_room then holds; else what the client is told.
std::optional<ApiError> reserve_decode_room(Core& core, Exchange& exchange);
// A place at the worker that was chosen, instead of what was reserved.
[[nodiscard]] fleet::RoomGuard occupy_decode_room(Core& core, Exchange& exchange, fleet::WorkerId worker,
                                                  int64_t choices);

// Believes a worker whose answer says that it is busy, and for how long (429 or 503 with Retry-After).
void note_busy(Core& core, fleet::WorkerId worker, const net::ResponseHead& head);

}  // namespace kindred::router
