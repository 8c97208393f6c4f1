// Where a request of a gateway goes: the router's own decisions (router/decide.h), and what they hold.
//
// Whole requests go to one worker. Where prefill and decode workers are up that speak vLLM's or SGLang's protocol, the
// decode worker is the destination and the prefill worker is named in `x-prefiller-host-port`, for llm-d's routing
// sidecar in front of the decode worker. Nothing has run yet, so no expert counts are known at that moment.
//
// Thread-safety: each request on the thread of its loop.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fleet/fleet.h"
#include "fleet/room.h"
#include "net/task.h"
#include "picker/conversation.h"
#include "router/exchange.h"

namespace kindred::picker {

// What is charged for a request. Letting go of it, once and however the stream ends, gives all of it back.
struct Charge {
  std::optional<fleet::WorkerId> worker = {};
  fleet::LegLoad leg = {};
  fleet::LoadGuard load = {}, prefill = {};
  fleet::RoomGuard place = {};
};

// The endpoints that a choice may be from; nothing: all.
using Subset = std::optional<std::vector<std::string>>;

// What there is to choose by, beside exchange.request.
struct Hints {
  Subset subset = {};
  bool body_seen = true;  // false: there is a body, and nothing of it is known
};

// Reads the request and chooses; `picked` and `charge` are set. Returns what the client is told instead, if there is
// no choice. May wait for a worker to tokenise the prompt.
net::Task<std::optional<router::ApiError>> choose(router::CorePtr core, router::Exchange& exchange, const Hints& hints,
                                                  Picked& picked, Charge& charge);

// Charges the worker behind `endpoint` instead, which the proxy says has served the request. An endpoint of no worker
// changes nothing.
void served_by(router::Core& core, std::string_view endpoint, Charge& charge);

}  // namespace kindred::picker
