// What happens to a request for a worker before its body is read: it gets a place, waits for one, or is
// turned away; and first it says whose it is.
//
// Thread-safety: each request on the thread of its own loop.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "base/result.h"
#include "net/http_message.h"
#include "net/http_server.h"
#include "net/task.h"
#include "router/core.h"
#include "router/exchange.h"
#include "router/gate.h"
#include "router/visit.h"

namespace kindred::router {

// What a client may say of how urgent its request is. Workers do not get these.
inline constexpr std::string_view kPriorityHeader = "X-Kindred-Priority";  // a lower number goes first
inline constexpr std::string_view kLaneHeader = "X-Kindred-Lane";          // interactive (default) or batch
inline constexpr int kMostPriority = 100;                                  // and -100 the least

// A request for a worker, from its head on. Lives in net::Request::permit.
struct Admitted {
  Admitted(CorePtr its_core, Loop& loop, net::Request& request, net::ResponseWriter& writer);

  const CorePtr core;
  Exchange exchange;
  Visit visit;
  Lane lane = Lane::kInteractive;
  std::unique_ptr<Permit> permit;
};

// The id that the client gave, if it is sane, or a new one.
std::string request_id_of(Core& core, const net::RequestHead& head);

// Error: kInvalid, naming the header. `key`: whose request it is.
Result<Claim> read_claim(const net::RequestHead& head, std::string key);

// For net::Doorkeeper: an Admitted, at once where a place is free; or an answer (400, 401, 429, 503).
net::Entrance admit(CorePtr core, Loop& loop, net::Request& request, net::ResponseWriter& writer);

}  // namespace kindred::router
