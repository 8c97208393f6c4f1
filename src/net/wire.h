// A TCP connection with a deadline, in clear or under TLS: what server and client have in common.
//
// Owned by shared_ptr; its timer holds only a weak one. Confined to its executor's thread. Nothing
// here throws, but for lack of memory.
#pragma once

#include <boost/asio/buffer.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "net/read_buffer.h"
#include "net/task.h"

namespace kindred::net {

using SystemError = boost::system::error_code;

class TlsStream;

class Wire final : public std::enable_shared_from_this<Wire> {
 public:
  // What happens when the deadline passes: kCancel ends what is being waited for, so that an answer
  // can still be written; kClose closes the socket.
  enum class Expiry { kCancel, kClose };

  explicit Wire(asio::ip::tcp::socket socket);
  ~Wire();
  Wire(const Wire&) = delete;
  Wire& operator=(const Wire&) = delete;

  asio::ip::tcp::socket& socket() { return socket_; }
  // Non-blocking, without Nagle's delay. After accept and connect.
  void set_options();

  // Under the deadline set before. All that is read and written from here on goes through `tls`.
  Task<SystemError> handshake(std::unique_ptr<TlsStream> tls);
  std::string tls_failure() const;  // of a handshake

  // One deadline at a time. Setting one is cheap: the timer is moved only where the new deadline is
  // earlier than the one it waits for, and otherwise finds the later one when it fires.
  void expire_after(std::chrono::milliseconds delay, Expiry what = Expiry::kCancel);
  void clear_deadline() {
    deadline_ = TimePoint::max();
    expired_ = false;
  }
  bool expired() const { return expired_; }  // the latest deadline has passed

  // For CancelToken callbacks: closes, and remembers why.
  void cancel();
  bool cancelled() const { return cancelled_; }

  void close();
  void shut_down_write();  // the peer sees an orderly end; what it still sends can be read
  void reset();            // closes so that the peer sees an error and no end (RST)
  bool is_open() const { return socket_.is_open(); }
  bool peer_closed();  // end of stream or an error waits to be read, or unasked bytes: no more use

  // Reads some bytes. End of file is an error here.
  Task<SystemError> read(ReadBuffer& into);
  Task<void> read(ReadBuffer& into, SystemError& error);  // the same; `error` must live until its end
  Task<SystemError> read(std::span<char> into, size_t& count);

  // What read() does, in two halves and without a coroutine of its own, where in_clear():
  //   auto [fault, count] = co_await wire.receive(into);
  //   const SystemError error = wire.received(into, fault, count);
  bool in_clear() const { return tls_ == nullptr; }
  auto receive(ReadBuffer& into) {
    // Where no operation may begin: into no room, which ends at once.
    const std::span<char> room = unusable() ? std::span<char>() : into.prepare();
    return socket_.async_read_some(asio::buffer(room.data(), room.size()), kNoThrow);
  }
  SystemError received(ReadBuffer& into, SystemError fault, size_t count) const {
    if (count > 0) into.commit(count);
    if (count > 0 && !fault) return {};
    const SystemError why = unusable();
    return why ? why : fault;
  }

  // Without waiting: error would_block where nothing, or not all, could be done now. Reading 0 bytes without an
  // error does not happen.
  SystemError read_now(std::span<char> into, size_t& count);
  // Drops what was taken from the front of `buffers`.
  SystemError write_now(std::span<asio::const_buffer>& buffers);

  // Writes all of `buffers` (which it uses up), gathered. With `progress_timeout`, a peer that takes
  // nothing for that long is an error; without, the deadline set before holds.
  Task<SystemError> write(std::span<asio::const_buffer> buffers,
                          std::optional<std::chrono::milliseconds> progress_timeout);

 private:
  using TimePoint = std::chrono::steady_clock::time_point;

  void arm();
  void on_timer(SystemError error);
  SystemError unusable() const;  // why no operation may start now
  Task<SystemError> read_tls(std::span<char> into, size_t& count);
  Task<SystemError> until_tls_can_go_on();

  asio::ip::tcp::socket socket_;
  std::unique_ptr<TlsStream> tls_;  // null: in clear
  asio::steady_timer timer_;
  TimePoint deadline_ = TimePoint::max();
  TimePoint armed_for_ = TimePoint::max();  // max: the timer is idle
  Expiry expiry_ = Expiry::kCancel;
  bool expired_ = false;
  bool cancelled_ = false;
};

// "address:port" of an end of a connection.
std::string to_text(const asio::ip::tcp::endpoint& endpoint);

}  // namespace kindred::net
