#include "net/wire.h"

#include <fmt/format.h>
#include <sys/socket.h>

namespace kindred::net {

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
  SystemError ignored;
  socket_.close(ignored);
}

void Wire::reset() {
  SystemError ignored;
  socket_.set_option(asio::socket_base::linger(true, 0), ignored);
  close();
}

bool Wire::peer_closed() {
  if (!is_open()) return true;
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
  SystemError fault = unusable();
  if (fault) co_return fault;
  const std::span<char> room = into.prepare();
  auto [error, count] = co_await socket_.async_read_some(asio::buffer(room.data(), room.size()), kNoThrow);
  into.commit(count);
  if (!error) co_return error;
  fault = unusable();
  co_return fault ? fault : error;
}

Task<SystemError> Wire::read(std::span<char> into, size_t& count) {
  count = 0;
  SystemError fault = unusable();
  if (fault) co_return fault;
  auto [error, read] = co_await socket_.async_read_some(asio::buffer(into.data(), into.size()), kNoThrow);
  count = read;
  if (!error) co_return error;
  fault = unusable();
  co_return fault ? fault : error;
}

Task<SystemError> Wire::write(std::span<asio::const_buffer> buffers,
                              std::optional<std::chrono::milliseconds> progress_timeout) {
  for (;;) {
    SystemError fault = unusable();
    if (fault) co_return fault;
    const SystemError written = write_now(socket_, buffers);
    if (written != asio::error::would_block) co_return written;
    if (progress_timeout) expire_after(*progress_timeout);
    auto [error] = co_await socket_.async_wait(asio::ip::tcp::socket::wait_write, kNoThrow);
    fault = error ? unusable() : error;
    if (progress_timeout) clear_deadline();
    if (error) co_return fault ? fault : error;
  }
}

SystemError write_now(asio::ip::tcp::socket& socket, std::span<asio::const_buffer>& buffers) {
  for (;;) {
    while (!buffers.empty() && buffers.front().size() == 0) buffers = buffers.subspan(1);
    if (buffers.empty()) return {};
    SystemError error;
    // Asio passes MSG_NOSIGNAL, so a peer that is gone is an error and no SIGPIPE.
    size_t count = socket.write_some(buffers, error);
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
