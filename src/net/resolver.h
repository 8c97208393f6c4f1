// Names to addresses, as an interface, so that tests can change what a name means.
//
// Thread-safety: confined to the executor's thread.
#pragma once

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <chrono>
#include <memory>
#include <vector>

#include "base/result.h"
#include "net/http_message.h"
#include "net/task.h"

namespace kindred::net {

class Resolver {
 public:
  virtual ~Resolver() = default;
  // The endpoint's addresses, in the order in which to try them; at least one. Nothing is remembered: each call
  // asks anew. Errors: kUnavailable, kTimeout, kCancelled.
  virtual Task<Result<std::vector<asio::ip::tcp::endpoint>>> resolve(Endpoint endpoint,
                                                                     std::chrono::steady_clock::time_point deadline,
                                                                     CancelToken cancel) = 0;
};

// getaddrinfo, on Asio's resolver thread.
std::shared_ptr<Resolver> system_resolver(asio::any_io_executor executor);

// Whether a host is an address already.
bool is_address(const std::string& host);

}  // namespace kindred::net
