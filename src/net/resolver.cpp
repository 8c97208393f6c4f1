#include "net/resolver.h"

#include <fmt/format.h>

#include <boost/asio/ip/address.hpp>
#include <boost/asio/steady_timer.hpp>

#include "net/wire.h"

namespace kindred::net {
namespace {

using asio::ip::tcp;

// A name being looked up. getaddrinfo cannot be interrupted, so the caller waits on a timer that the
// answer ends early, and leaves the answer alone when it comes too late.
struct Lookup {
  explicit Lookup(const asio::any_io_executor& executor) : resolver(executor), done(executor) {}
  tcp::resolver resolver;
  asio::steady_timer done;
  bool finished = false;
  SystemError error;
  std::vector<tcp::endpoint> endpoints;
};

class SystemResolver final : public Resolver {
 public:
  explicit SystemResolver(asio::any_io_executor executor) : executor_(std::move(executor)) {}

  Task<Result<std::vector<tcp::endpoint>>> resolve(Endpoint endpoint, std::chrono::steady_clock::time_point deadline,
                                                   CancelToken cancel) override {
    const auto lookup = std::make_shared<Lookup>(executor_);
    lookup->done.expires_at(deadline);
    const auto registration = cancel.on_cancel([lookup] { lookup->done.cancel(); });
    lookup->resolver.async_resolve(endpoint.host, std::to_string(endpoint.port), tcp::resolver::numeric_service,
                                   [lookup](SystemError error, const tcp::resolver::results_type& results) {
                                     lookup->finished = true;
                                     lookup->error = error;
                                     for (const auto& entry : results) lookup->endpoints.push_back(entry.endpoint());
                                     lookup->done.cancel();
                                   });
    if (!cancel.cancelled()) co_await lookup->done.async_wait(kNoThrow);
    if (cancel.cancelled()) {
      co_return Error{ErrorCode::kCancelled, fmt::format("the request to {} was cancelled", endpoint.text())};
    }
    if (!lookup->finished) {
      co_return Error{ErrorCode::kTimeout, fmt::format("the name {} was not resolved in time", endpoint.host)};
    }
    if (lookup->error || lookup->endpoints.empty()) {
      co_return Error{ErrorCode::kUnavailable,
                      fmt::format("the name {} cannot be resolved: {}", endpoint.host, lookup->error.message())};
    }
    co_return std::move(lookup->endpoints);
  }

 private:
  asio::any_io_executor executor_;
};

}  // namespace

std::shared_ptr<Resolver> system_resolver(asio::any_io_executor executor) {
  return std::make_shared<SystemResolver>(std::move(executor));
}

bool is_address(const std::string& host) {
  SystemError error;
  asio::ip::make_address(host, error);
  return !error;
}

}  // namespace kindred::net
