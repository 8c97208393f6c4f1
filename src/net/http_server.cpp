#include "net/http_server.h"

#include <fmt/format.h>

#include <atomic>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <unordered_set>
#include <vector>

#include "net/server_connection.h"
#include "net/wire.h"

namespace kindred::net {
namespace {

using asio::ip::tcp;
using std::chrono::steady_clock;

// Connections over the limit are told so, as long as there are not too many of those either.
constexpr size_t kTurnedAwayAtOnce = 256;
constexpr std::chrono::milliseconds kAcceptPause{100};  // when the process is out of descriptors
constexpr std::chrono::milliseconds kCloseGrace{1'000};

Error listen_error(const std::string& host, uint16_t port, const SystemError& cause) {
  if (cause == asio::error::address_in_use) {
    return Error{ErrorCode::kIo, fmt::format("port {} is in use by another process (address {})", port, host)};
  }
  if (cause == asio::error::access_denied) {
    return Error{ErrorCode::kIo, fmt::format("no permission to listen on {}:{}", host, port)};
  }
  return Error{ErrorCode::kIo, fmt::format("cannot listen on {}:{}: {}", host, port, cause.message())};
}

}  // namespace

struct HttpServer::Impl : std::enable_shared_from_this<Impl> {
  Impl(asio::any_io_executor its_executor, ServerOptions options, Handler handler, Doorkeeper doorkeeper)
      : executor(std::move(its_executor)),
        context(std::make_shared<ServerContext>(ServerContext{options, std::move(handler), std::move(doorkeeper)})),
        acceptor(executor),
        emptied(executor) {}

  asio::any_io_executor executor;
  std::shared_ptr<ServerContext> context;
  tcp::acceptor acceptor;
  asio::steady_timer emptied;  // cancelled when the last connection goes
  std::unordered_set<ServerConnection*> open;
  size_t turned_away = 0;
  // Connections given to this server: those in `open`, and those that are on their way to its thread.
  std::atomic<size_t> given{0};
  std::vector<std::shared_ptr<Impl>> others;  // that get connections from this one's acceptor
  size_t turn = 0;                            // whose turn it is among equals

  // One of `given`, while it lives.
  class Given {
   public:
    explicit Given(std::shared_ptr<Impl> to) : to_(std::move(to)) { ++to_->given; }
    Given(Given&&) noexcept = default;
    Given& operator=(Given&&) = delete;
    ~Given() {
      if (to_) --to_->given;
    }
    const std::shared_ptr<Impl>& to() const { return to_; }

   private:
    std::shared_ptr<Impl> to_;
  };

  // A connection's place in `open`, from its acceptance on and whatever ends its coroutine.
  class Member {
   public:
    Member(Given given, std::shared_ptr<ServerConnection> connection)
        : given_(std::move(given)), connection_(std::move(connection)) {
      server().open.insert(connection_.get());
    }
    ~Member() {
      server().open.erase(connection_.get());
      if (server().open.empty()) server().emptied.cancel();
    }
    Member(const Member&) = delete;
    Member& operator=(const Member&) = delete;

    Impl& server() { return *given_.to(); }
    ServerConnection& connection() { return *connection_; }

   private:
    Given given_;
    std::shared_ptr<ServerConnection> connection_;
  };

  Status bind(const std::string& host, uint16_t port);
  static Task<void> accept_loop(std::shared_ptr<Impl> self);
  static Task<void> serve(std::unique_ptr<Member> member);
  static Task<void> turn_away(std::shared_ptr<Impl> self, std::shared_ptr<ServerConnection> connection);
  std::shared_ptr<Impl> next_taker();
  size_t all_given() const;
  void hand_over(tcp::socket socket, const std::shared_ptr<Impl>& taker);
  void welcome(tcp::socket socket, Given given);
  void send_away(tcp::socket socket);
  void stop();
  Task<void> wait_until_empty(std::chrono::milliseconds at_most);
  std::vector<std::shared_ptr<ServerConnection>> snapshot() const;
};

Status HttpServer::Impl::bind(const std::string& host, uint16_t port) {
  SystemError error;
  asio::ip::address address = asio::ip::make_address(host, error);
  if (error) {
    tcp::resolver resolver(executor);
    const auto found = resolver.resolve(host, "", error);
    if (error || found.empty()) return listen_error(host, port, error);
    address = found.begin()->endpoint().address();
  }
  const tcp::endpoint endpoint(address, port);
  acceptor.open(endpoint.protocol(), error);
  if (!error) acceptor.set_option(tcp::acceptor::reuse_address(true), error);
  if (!error) acceptor.bind(endpoint, error);
  if (!error) acceptor.listen(tcp::acceptor::max_listen_connections, error);
  if (!error) return {};
  SystemError ignored;
  acceptor.close(ignored);
  return listen_error(host, port, error);
}

Task<void> HttpServer::Impl::accept_loop(std::shared_ptr<Impl> self) {
  bool complained = false;
  for (;;) {
    const std::shared_ptr<Impl> taker = self->next_taker();
    auto [error, socket] = co_await self->acceptor.async_accept(taker->executor, kNoThrow);
    if (!self->acceptor.is_open()) co_return;
    if (!error) {
      complained = false;
      self->hand_over(std::move(socket), taker);
      continue;
    }
    if (error == asio::error::connection_aborted) continue;
    if (!complained) self->context->log.error("cannot accept connections for now: {}", error.message());
    complained = true;
    asio::steady_timer pause(self->executor, kAcceptPause);
    co_await pause.async_wait(kNoThrow);
  }
}

// Who has fewest at this moment; what closes until the next connection comes is of no account.
std::shared_ptr<HttpServer::Impl> HttpServer::Impl::next_taker() {
  if (others.empty()) return shared_from_this();
  const size_t count = others.size() + 1;
  std::shared_ptr<Impl> best;
  for (size_t i = 0; i < count; ++i) {
    const size_t at = (turn + i) % count;
    std::shared_ptr<Impl> one = at == 0 ? shared_from_this() : others[at - 1];
    if (!best || one->given < best->given) best = std::move(one);
  }
  turn = (turn + 1) % count;
  return best;
}

size_t HttpServer::Impl::all_given() const {
  size_t sum = given;
  for (const auto& other : others) sum += other->given;
  return sum;
}

void HttpServer::Impl::hand_over(tcp::socket socket, const std::shared_ptr<Impl>& taker) {
  // Nothing here may end the accept loop: for want of memory this one connection is dropped.
  try {
    if (all_given() >= context->options.connections) {
      if (taker.get() == this) return send_away(std::move(socket));
      asio::post(taker->executor,
                 [taker, socket = std::move(socket)]() mutable { taker->send_away(std::move(socket)); });
      return;
    }
    Given place(taker);
    if (taker.get() == this) return welcome(std::move(socket), std::move(place));
    asio::post(taker->executor, [socket = std::move(socket), place = std::move(place)]() mutable {
      Impl& there = *place.to();
      there.welcome(std::move(socket), std::move(place));
    });
  } catch (const std::exception& fault) {
    context->log.error("a new connection was dropped: {}", fault.what());
  }
}

void HttpServer::Impl::welcome(tcp::socket socket, Given place) {
  try {
    const auto connection = std::make_shared<ServerConnection>(context, std::move(socket));
    asio::co_spawn(executor, serve(std::make_unique<Member>(std::move(place), connection)), asio::detached);
  } catch (const std::exception& fault) {
    context->log.error("a new connection was dropped: {}", fault.what());
  }
}

void HttpServer::Impl::send_away(tcp::socket socket) {
  if (turned_away >= kTurnedAwayAtOnce) return;
  try {
    const auto connection = std::make_shared<ServerConnection>(context, std::move(socket));
    ++turned_away;
    asio::co_spawn(executor, turn_away(shared_from_this(), connection), asio::detached);
  } catch (const std::exception& fault) {
    context->log.error("a new connection was dropped: {}", fault.what());
  }
}

Task<void> HttpServer::Impl::serve(std::unique_ptr<Member> member) {
  try {
    co_await member->connection().run();
  } catch (const std::exception& fault) {
    member->server().context->log.error("a connection was aborted: {}", fault.what());
  }
  member->connection().cancel();
}

Task<void> HttpServer::Impl::turn_away(std::shared_ptr<Impl> self, std::shared_ptr<ServerConnection> connection) {
  try {
    co_await connection->turn_away();
  } catch (const std::exception&) {
    connection->close_socket();
  }
  --self->turned_away;
}

void HttpServer::Impl::stop() {
  context->stopping = true;
  SystemError ignored;
  acceptor.close(ignored);
  for (const auto& connection : snapshot()) {
    if (connection->idle()) connection->close_socket();
  }
}

std::vector<std::shared_ptr<ServerConnection>> HttpServer::Impl::snapshot() const {
  std::vector<std::shared_ptr<ServerConnection>> all;
  all.reserve(open.size());
  for (ServerConnection* connection : open) all.push_back(connection->shared_from_this());
  return all;
}

Task<void> HttpServer::Impl::wait_until_empty(std::chrono::milliseconds at_most) {
  const auto deadline = steady_clock::now() + at_most;
  while (!open.empty() && steady_clock::now() < deadline) {
    emptied.expires_at(deadline);
    co_await emptied.async_wait(kNoThrow);
  }
}

HttpServer::HttpServer(asio::any_io_executor executor, ServerOptions options, Handler handler, Doorkeeper doorkeeper)
    : impl_(std::make_shared<Impl>(std::move(executor), options, std::move(handler), std::move(doorkeeper))) {}

HttpServer::~HttpServer() {
  // Sockets only: what a request's cancellation would call may be gone already.
  SystemError ignored;
  impl_->context->stopping = true;
  impl_->acceptor.close(ignored);
  for (const auto& connection : impl_->snapshot()) connection->close_socket();
}

void HttpServer::share_with(const std::vector<HttpServer*>& others) {
  KINDRED_CHECK(!impl_->acceptor.is_open());
  for (const HttpServer* other : others) impl_->others.push_back(other->impl_);
}

Result<uint16_t> HttpServer::listen(const std::string& host, uint16_t port) {
  KINDRED_CHECK(!impl_->acceptor.is_open());
  if (Status bound = impl_->bind(host, port); !bound) return std::move(bound).error();
  SystemError error;
  const tcp::endpoint local = impl_->acceptor.local_endpoint(error);
  if (error) return listen_error(host, port, error);
  asio::co_spawn(impl_->executor, Impl::accept_loop(impl_), asio::detached);
  return local.port();
}

void HttpServer::stop() {
  asio::post(impl_->executor, [impl = impl_] { impl->stop(); });
}

Task<void> HttpServer::drain(std::chrono::milliseconds deadline_ms) {
  const std::shared_ptr<Impl> impl = impl_;
  impl->stop();
  co_await impl->wait_until_empty(deadline_ms);
  for (const auto& connection : impl->snapshot()) connection->cancel();
  co_await impl->wait_until_empty(kCloseGrace);
}

size_t HttpServer::connections() const { return impl_->all_given(); }

}  // namespace kindred::net
