#include "net/client_pool.h"

#include <fmt/format.h>

#include <algorithm>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>

#include "net/tls.h"

namespace kindred::net {
namespace {

using asio::ip::tcp;
using std::chrono::steady_clock;

// For so long an idle connection is taken to be open without a look, which is a system call for each request of a
// busy router. If it is not, the request is sent again on a new one, as it is when the peer closes just then.
constexpr std::chrono::milliseconds kStillOpen{5};

constexpr size_t kBuffers = 64;  // that are kept for answers to come, of 4 KiB

Error cancelled_error(const Endpoint& endpoint) {
  return Error{ErrorCode::kCancelled, fmt::format("the request to {} was cancelled", endpoint.text())};
}

Error connect_timeout(const Endpoint& endpoint) {
  return Error{ErrorCode::kTimeout, fmt::format("{} did not accept a connection in time", endpoint.text())};
}

}  // namespace

ClientPool::Place& ClientPool::Place::operator=(Place&& other) noexcept {
  if (this == &other) return *this;
  give_back();
  pool_ = std::move(other.pool_);
  endpoint_ = std::move(other.endpoint_);
  return *this;
}

void ClientPool::Place::give_back() {
  const std::shared_ptr<ClientPool> pool = pool_.lock();
  pool_.reset();
  if (pool) pool->leave(endpoint_);
}

std::optional<ClientPool::Place> ClientPool::enter_now(const Endpoint& endpoint) {
  Places& places = places_[endpoint];
  if (places.taken >= options_.connections_per_endpoint) return std::nullopt;
  ++places.taken;
  return std::optional<Place>(std::in_place, weak_from_this(), endpoint);
}

Task<Result<ClientPool::Place>> ClientPool::enter(Endpoint endpoint, CancelToken cancel) {
  if (std::optional<Place> place = enter_now(endpoint)) co_return *std::move(place);
  Places& places = places_[endpoint];
  const Error full{ErrorCode::kExhausted,
                   fmt::format("all {} connections to {} are in use", places.taken, endpoint.text())};
  if (places.waiters.size() >= options_.waiters_per_endpoint) co_return full;
  const auto waiter = std::make_shared<Waiter>(executor_);
  waiter->woken.expires_after(options_.wait_timeout_ms);
  places.waiters.push_back(waiter);
  const auto registration = cancel.on_cancel([waiter] { waiter->woken.cancel(); });
  if (!cancel.cancelled()) co_await waiter->woken.async_wait(kNoThrow);
  if (waiter->has_place) {
    // Held from here on, so that it goes back also if the client has left meanwhile.
    Place place(weak_from_this(), endpoint);
    if (cancel.cancelled()) co_return cancelled_error(endpoint);
    co_return std::move(place);
  }
  std::erase(places_[endpoint].waiters, waiter);
  if (cancel.cancelled()) co_return cancelled_error(endpoint);
  co_return full;
}

void ClientPool::leave(const Endpoint& endpoint) {
  const auto at = places_.find(endpoint);
  KINDRED_CHECK(at != places_.end() && at->second.taken > 0);
  std::deque<std::shared_ptr<Waiter>>& waiters = at->second.waiters;
  if (!waiters.empty()) {
    // The place passes on without being free in between, so nobody overtakes.
    waiters.front()->has_place = true;
    waiters.front()->woken.cancel();
    waiters.pop_front();
    return;
  }
  if (--at->second.taken == 0) places_.erase(at);
}

ReadBuffer ClientPool::take_buffer() {
  if (buffers_.empty()) return {};
  ReadBuffer buffer = std::move(buffers_.back());
  buffers_.pop_back();
  return buffer;
}

void ClientPool::give_buffer(ReadBuffer buffer) {
  if (buffers_.size() == kBuffers || !buffer.has_first_bytes()) return;
  buffer.clear();
  buffers_.push_back(std::move(buffer));
}

std::shared_ptr<Wire> ClientPool::take(const Endpoint& endpoint) {
  const auto at = idle_.find(endpoint);
  if (at == idle_.end()) return nullptr;
  const auto now = steady_clock::now();
  while (!at->second.empty()) {
    Idle idle = std::move(at->second.back());
    at->second.pop_back();
    const bool closed = now - idle.since < kStillOpen ? !idle.wire->is_open() : idle.wire->peer_closed();
    if (closed) {
      idle.wire->close();
      continue;
    }
    idle.wire->clear_deadline();
    return std::move(idle.wire);
  }
  idle_.erase(at);
  return nullptr;
}

void ClientPool::put_back(const Endpoint& endpoint, std::shared_ptr<Wire> wire) {
  if (shut_down_ || options_.idle_per_endpoint == 0 || is_retired(endpoint, *wire)) return wire->close();
  std::vector<Idle>& idle = idle_[endpoint];
  if (idle.size() >= options_.idle_per_endpoint) {
    // Those whose idle time is over have closed themselves; otherwise the oldest makes room.
    std::erase_if(idle, [](const Idle& other) { return !other.wire->is_open(); });
    if (idle.size() >= options_.idle_per_endpoint) {
      idle.front().wire->close();
      idle.erase(idle.begin());
    }
  }
  wire->expire_after(options_.idle_timeout_ms, Wire::Expiry::kClose);
  idle.push_back({std::move(wire), steady_clock::now()});
}

Task<Result<std::vector<tcp::endpoint>>> ClientPool::addresses(Endpoint endpoint, steady_clock::time_point deadline,
                                                               CancelToken cancel) {
  SystemError not_literal;
  const asio::ip::address address = asio::ip::make_address(endpoint.host, not_literal);
  if (!not_literal) co_return std::vector<tcp::endpoint>(1, tcp::endpoint(address, endpoint.port));
  auto found = co_await resolver_->resolve(endpoint, deadline, cancel);
  if (!found && found.error().code == ErrorCode::kTimeout) co_return connect_timeout(endpoint);
  co_return found;
}

bool ClientPool::is_retired(const Endpoint& endpoint, Wire& wire) const {
  const auto at = known_.find(endpoint);
  if (at == known_.end()) return false;
  SystemError error;
  const tcp::endpoint peer = wire.socket().remote_endpoint(error);
  return error || std::find(at->second.begin(), at->second.end(), peer) == at->second.end();
}

Task<void> ClientPool::refresh(Endpoint endpoint, CancelToken cancel) {
  if (is_address(endpoint.host)) co_return;
  const auto found = co_await addresses(endpoint, steady_clock::now() + options_.connect_timeout_ms, std::move(cancel));
  if (!found || shut_down_) co_return;  // not knowing better is no reason to drop what works
  known_[endpoint] = *found;
  const auto at = idle_.find(endpoint);
  if (at == idle_.end()) co_return;
  std::erase_if(at->second, [&](const Idle& idle) {
    const bool gone = is_retired(endpoint, *idle.wire);
    if (gone) idle.wire->close();
    return gone;
  });
}

void ClientPool::shut_down() {
  shut_down_ = true;
  for (auto& [endpoint, idle] : idle_) {
    for (const Idle& one : idle) one.wire->close();
  }
  idle_.clear();
}

// Under the deadline of the connect.
Task<Status> ClientPool::secure(Wire& wire, const Endpoint& endpoint) {
  if (!options_.tls) {
    co_return Error{ErrorCode::kUnavailable, fmt::format("{} wants TLS, which is not set up here", endpoint.url())};
  }
  auto context = options_.tls->context();
  if (!context) co_return std::move(context).error();
  std::unique_ptr<TlsStream> tls = TlsStream::client(*context, wire.socket().native_handle(), endpoint.host);
  const SystemError error = co_await wire.handshake(std::move(tls));
  if (!error) co_return Status();
  if (wire.cancelled()) co_return cancelled_error(endpoint);
  if (wire.expired()) co_return connect_timeout(endpoint);
  const std::string why = wire.tls_failure();
  co_return Error{ErrorCode::kUnavailable, fmt::format("TLS with {} cannot be agreed: {}", endpoint.text(),
                                                       why.empty() ? error.message() : why)};
}

Task<Result<std::shared_ptr<Wire>>> ClientPool::connect(Endpoint endpoint, CancelToken cancel) {
  if (cancel.cancelled()) co_return cancelled_error(endpoint);
  const asio::any_io_executor executor = executor_;
  const auto deadline = steady_clock::now() + options_.connect_timeout_ms;
  auto endpoints = co_await addresses(endpoint, deadline, cancel);
  if (!endpoints) co_return std::move(endpoints).error();
  if (const auto known = known_.find(endpoint); known != known_.end()) known->second = *endpoints;
  SystemError error = asio::error::host_not_found;
  for (const tcp::endpoint& address : *endpoints) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - steady_clock::now());
    if (left.count() <= 0) co_return connect_timeout(endpoint);
    const auto wire = std::make_shared<Wire>(tcp::socket(executor));
    const auto registration = cancel.on_cancel([wire] { wire->cancel(); });
    wire->socket().open(address.protocol(), error);
    if (error) continue;
    wire->expire_after(left);
    auto [connect_error] = co_await wire->socket().async_connect(address, kNoThrow);
    error = connect_error;
    if (wire->cancelled()) co_return cancelled_error(endpoint);
    if (error && wire->expired()) co_return connect_timeout(endpoint);
    if (error) continue;
    wire->set_options();
    if (endpoint.tls) {
      const Status secured = co_await secure(*wire, endpoint);
      if (!secured) co_return secured.error();
    }
    wire->clear_deadline();
    co_return wire;
  }
  co_return Error{ErrorCode::kUnavailable, fmt::format("cannot connect to {}: {}", endpoint.text(), error.message())};
}

}  // namespace kindred::net
