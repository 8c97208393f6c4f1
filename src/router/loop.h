// What each thread of the router has to itself. A request stays on the thread that accepted its connection, with
// its client, its legs and the connections to workers that they use.
//
// Thread-safety: confined to the executor's thread, but for the executor and for closing.token(), which may be
// passed to what will run there. A resolver in `upstream` is shared by the loops of a router.
#pragma once

#include <boost/asio/any_io_executor.hpp>
#include <utility>

#include "net/http_client.h"
#include "net/task.h"

namespace kindred::router {

struct Loop {
  Loop(net::asio::any_io_executor on, net::ClientOptions upstream)
      : executor(std::move(on)), client(executor, std::move(upstream)) {}

  const net::asio::any_io_executor executor;
  net::HttpClient client;     // to workers, for requests; a pool of its own
  net::CancelSource closing;  // ends what runs here in the background
};

}  // namespace kindred::router
