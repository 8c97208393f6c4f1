// Idle keep-alive connections by endpoint, the making of new ones, and the bound on both.
//
// Shared by the HttpClient and weakly by its responses: one that ends after the client is gone closes
// its connection. Confined to its executor's thread.
#pragma once

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <deque>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "base/result.h"
#include "net/http_client.h"
#include "net/http_message.h"
#include "net/read_buffer.h"
#include "net/resolver.h"
#include "net/task.h"
#include "net/wire.h"

namespace kindred::net {

class ClientPool : public std::enable_shared_from_this<ClientPool> {
 public:
  // The right to one connection of an endpoint; given back when it goes. A connection becomes idle before
  // its place is given back and idle ones are taken before new ones are made, so the places bound all that
  // are open.
  class Place {
   public:
    Place() = default;
    Place(std::weak_ptr<ClientPool> pool, Endpoint endpoint) : pool_(std::move(pool)), endpoint_(std::move(endpoint)) {}
    Place(Place&& other) noexcept = default;
    Place& operator=(Place&& other) noexcept;
    ~Place() { give_back(); }
    void give_back();

   private:
    std::weak_ptr<ClientPool> pool_;
    Endpoint endpoint_;
  };

  ClientPool(asio::any_io_executor executor, ClientOptions options)
      : executor_(std::move(executor)),
        options_(std::move(options)),
        resolver_(options_.resolver ? options_.resolver : system_resolver(executor_)) {}

  const ClientOptions& options() const { return options_; }

  // A place that is free, or nothing.
  std::optional<Place> enter_now(const Endpoint& endpoint);
  // Waits for a place, in order of arrival. Errors: kExhausted, kCancelled.
  Task<Result<Place>> enter(Endpoint endpoint, CancelToken cancel);

  // Memory for an answer: of one read before, if there is, as that is still in the processor's cache.
  ReadBuffer take_buffer();
  void give_buffer(ReadBuffer buffer);

  // The idle connection used last, or nullptr. One that its peer was seen to close is not given.
  std::shared_ptr<Wire> take(const Endpoint& endpoint);
  void put_back(const Endpoint& endpoint, std::shared_ptr<Wire> wire);
  // Looks a name up and retires connections to addresses that it means no more: idle ones now, others when they
  // would become idle. Without an answer all stay.
  Task<void> refresh(Endpoint endpoint, CancelToken cancel);
  // Closes what is idle and keeps nothing from now on.
  void shut_down();

  // A new connection. Errors: kUnavailable, kTimeout, kCancelled.
  Task<Result<std::shared_ptr<Wire>>> connect(Endpoint endpoint, CancelToken cancel);

  const asio::any_io_executor& executor() const { return executor_; }

 private:
  struct EndpointHash {
    size_t operator()(const Endpoint& endpoint) const {
      return std::hash<std::string_view>()(endpoint.host) * 31 + endpoint.port * 2U + (endpoint.tls ? 1 : 0);
    }
  };

  struct Waiter {
    explicit Waiter(const asio::any_io_executor& executor) : woken(executor) {}
    asio::steady_timer woken;
    bool has_place = false;
  };
  struct Places {
    size_t taken = 0;
    std::deque<std::shared_ptr<Waiter>> waiters;
  };

  void leave(const Endpoint& endpoint);
  // Of a name, or the one that the host is.
  Task<Result<std::vector<asio::ip::tcp::endpoint>>> addresses(Endpoint endpoint,
                                                               std::chrono::steady_clock::time_point deadline,
                                                               CancelToken cancel);
  bool is_retired(const Endpoint& endpoint, Wire& wire) const;
  Task<Status> secure(Wire& wire, const Endpoint& endpoint);

  asio::any_io_executor executor_;
  ClientOptions options_;
  std::shared_ptr<Resolver> resolver_;
  bool shut_down_ = false;
  std::unordered_map<Endpoint, Places, EndpointHash> places_;  // where any are taken
  struct Idle {
    std::shared_ptr<Wire> wire;
    std::chrono::steady_clock::time_point since;
  };
  std::unordered_map<Endpoint, std::vector<Idle>, EndpointHash> idle_;
  std::vector<ReadBuffer> buffers_;
  // What names meant when they were refreshed last.
  std::unordered_map<Endpoint, std::vector<asio::ip::tcp::endpoint>, EndpointHash> known_;
};

}  // namespace kindred::net
