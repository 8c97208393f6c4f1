// Idle keep-alive connections by endpoint, and the making of new ones.
//
// Shared by the HttpClient and weakly by its responses: one that ends after the client is gone closes
// its connection. Confined to its executor's thread.
#pragma once

#include <boost/asio/any_io_executor.hpp>
#include <memory>
#include <unordered_map>
#include <vector>

#include "base/result.h"
#include "net/http_client.h"
#include "net/http_message.h"
#include "net/task.h"
#include "net/wire.h"

namespace kindred::net {

class ClientPool {
 public:
  ClientPool(asio::any_io_executor executor, ClientOptions options)
      : executor_(std::move(executor)), options_(options) {}

  const ClientOptions& options() const { return options_; }

  // The idle connection used last, or nullptr. One that its peer has closed is not given.
  std::shared_ptr<Wire> take(const Endpoint& endpoint);
  void put_back(const Endpoint& endpoint, std::shared_ptr<Wire> wire);
  // Closes what is idle and keeps nothing from now on.
  void shut_down();

  // A new connection. Errors: kUnavailable, kTimeout, kCancelled.
  static Task<Result<std::shared_ptr<Wire>>> connect(asio::any_io_executor executor, Endpoint endpoint,
                                                     std::chrono::milliseconds timeout, CancelToken cancel);

  const asio::any_io_executor& executor() const { return executor_; }

 private:
  struct EndpointHash {
    size_t operator()(const Endpoint& endpoint) const {
      return std::hash<std::string_view>()(endpoint.host) * 31 + endpoint.port;
    }
  };

  asio::any_io_executor executor_;
  ClientOptions options_;
  bool shut_down_ = false;
  std::unordered_map<Endpoint, std::vector<std::shared_ptr<Wire>>, EndpointHash> idle_;
};

}  // namespace kindred::net
