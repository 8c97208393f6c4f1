#include "net/wire.h"

#include <fmt/format.h>
#include <sys/socket.h>

#include <algorithm>

#include "net/tls.h"

namespace kindred::net {

Wire::Wire(asio::ip::tcp::socket socket) : socket_(std::move(socket)), timer_(socket_.get_executor()) {}

Wire::~Wire() = default;

void Wire::set_options() {
  SystemError ignored;  // a peer that is gone already shows at the first read
  socket_.non_blocking(true, ignored);
  socket_.set_option(asio::ip::tcp::no_delay(true), ignored);
}

void Wire::expire_after(std::chrono::milliseconds delay, Expiry what) {
  expired_ = false;
  expiry_ = what;
  deadline_ = std::chrono::steady_clock::now() + delay;
  if (deadline_ < armed_for_) arm();
}

void Wire::arm() {
  armed_for_ = deadline_;
  timer_.expires_at(deadline_);  // ends an earlier wait, whose handler then finds an error
  timer_.async_wait([weak = weak_from_this()](SystemError error) {
    if (const std::shared_ptr<Wire> self = weak.lock()) self->on_timer(error);
  });
}

void Wire::on_timer(SystemError error) {
  if (error) return;
  // The clock decides and not the fact of being called: a wait that had ended before it was replaced
  // still comes here.
  const TimePoint now = std::chrono::steady_clock::now();
  if (now < armed_for_) return;
  armed_for_ = TimePoint::max();
  if (deadline_ == TimePoint::max()) return;
  if (now < deadline_) return arm();
  deadline_ = TimePoint::max();
  expired_ = true;
  if (expiry_ == Expiry::kClose) return close();
  SystemError ignored;
  socket_.cancel(ignored);
}

void Wire::cancel() {
  cancelled_ = true;
  close();
}

void Wire::close() {
  deadline_ = armed_for_ = TimePoint::max();
  timer_.cancel();
  if (tls_ && socket_.is_open()) tls_->close_notify();
  SystemError ignored;
  socket_.close(ignored);
}

void Wire::shut_down_write() {
  if (tls_ && socket_.is_open()) tls_->close_notify();
  SystemError ignored;
  socket_.shutdown(asio::ip::tcp::socket::shutdown_send, ignored);
}

void Wire::reset() {
  SystemError ignored;
  socket_.set_option(asio::socket_base::linger(true, 0), ignored);
  close();
}

bool Wire::peer_closed() {
  if (!is_open()) return true;
  if (tls_) return tls_->readable_now();
  char byte = 0;
  const ssize_t got = ::recv(socket_.native_handle(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return got >= 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
}

SystemError Wire::unusable() const {
  if (cancelled_) return asio::error::operation_aborted;
  if (expired_) return asio::error::timed_out;
  if (!is_open()) return asio::error::not_connected;
  return {};
}

Task<SystemError> Wire::read(ReadBuffer& into) {
  SystemError error;
  co_await read(into, error);
  co_return error;
}

Task<void> Wire::read(ReadBuffer& into, SystemError& error) {
  if (in_clear()) {
    auto [fault, count] = co_await receive(into);
    error = received(into, fault, count);
    co_return;
  }
  error = unusable();
  if (error) co_return;
  size_t got = 0;
  error = co_await read_tls(into.prepare(), got);
  into.commit(got);
}

Task<SystemError> Wire::read(std::span<char> into, size_t& count) {
  count = 0;
  SystemError fault = unusable();
  if (fault) co_return fault;
  if (tls_) co_return co_await read_tls(into, count);
  auto [error, read] = co_await socket_.async_read_some(asio::buffer(into.data(), into.size()), kNoThrow);
  count = read;
  if (!error) co_return error;
  fault = unusable();
  co_return fault ? fault : error;
}

Task<SystemError> Wire::until_tls_can_go_on() {
  const auto direction = tls_->wants_write() ? asio::ip::tcp::socket::wait_write : asio::ip::tcp::socket::wait_read;
  auto [error] = co_await socket_.async_wait(direction, kNoThrow);
  const SystemError fault = unusable();
  co_return fault ? fault : error;
}

Task<SystemError> Wire::read_tls(std::span<char> into, size_t& count) {
  for (;;) {
    SystemError error = tls_->read(into, count);
    if (error != asio::error::would_block) co_return error;
    error = co_await until_tls_can_go_on();
    if (error) co_return error;
  }
}

Task<SystemError> Wire::handshake(std::unique_ptr<TlsStream> tls) {
  SystemError error = unusable();
  if (error) co_return error;
  if (!tls) co_return asio::error::no_memory;
  tls_ = std::move(tls);
  for (;;) {
    error = tls_->handshake();
    if (error != asio::error::would_block) co_return error;
    error = co_await until_tls_can_go_on();
    if (error) co_return error;
  }
}

std::string Wire::tls_failure() const { return tls_ ? tls_->failure() : std::string(); }

Task<SystemError> Wire::write(std::span<asio::const_buffer> buffers,
                              std::optional<std::chrono::milliseconds> progress_timeout) {
  for (;;) {
    SystemError fault = unusable();
    if (fault) co_return fault;
    const SystemError written = write_now(buffers);
    if (written != asio::error::would_block) co_return written;
    if (progress_timeout) expire_after(*progress_timeout);
    const bool to_write = !tls_ || tls_->wants_write();
    auto [error] = co_await socket_.async_wait(
        to_write ? asio::ip::tcp::socket::wait_write : asio::ip::tcp::socket::wait_read, kNoThrow);
    fault = error ? unusable() : error;
    if (progress_timeout) clear_deadline();
    if (error) co_return fault ? fault : error;
  }
}

SystemError Wire::read_now(std::span<char> into, size_t& count) {
  if (tls_) return tls_->read(into, count);
  SystemError error;
  count = socket_.read_some(asio::buffer(into.data(), into.size()), error);
  return error == asio::error::interrupted ? asio::error::would_block : error;
}

SystemError Wire::write_now(std::span<asio::const_buffer>& buffers) {
  if (tls_) return tls_->write(buffers);
  for (;;) {
    while (!buffers.empty() && buffers.front().size() == 0) buffers = buffers.subspan(1);
    if (buffers.empty()) return {};
    SystemError error;
    // Asio passes MSG_NOSIGNAL, so a peer that is gone is an error and no SIGPIPE.
    // The general form gathers into an array first.
    size_t count =
        buffers.size() == 1 ? socket_.write_some(buffers.front(), error) : socket_.write_some(buffers, error);
    if (error == asio::error::interrupted) continue;
    if (error) return error;
    while (count > 0) {
      const size_t part = std::min(count, buffers.front().size());
      buffers.front() += part;
      count -= part;
      if (buffers.front().size() == 0) buffers = buffers.subspan(1);
    }
  }
}

std::string to_text(const asio::ip::tcp::endpoint& endpoint) {
  const asio::ip::address address = endpoint.address();
  return address.is_v6() ? fmt::format("[{}]:{}", address.to_string(), endpoint.port())
                         : fmt::format("{}:{}", address.to_string(), endpoint.port());
}

}  // namespace kindred::net
