// One connection of an HttpServer: reads requests, runs the handler, writes responses.
//
// Owned by the coroutine that runs run(); a wait for readability shares it until the socket closes.
// Confined to its executor's thread.
#pragma once

#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/log.h"
#include "net/http_message.h"
#include "net/http_server.h"
#include "net/read_buffer.h"
#include "net/task.h"
#include "net/wire.h"

namespace kindred::net {

class ServerConnection;

// What a server's connections share.
struct ServerContext {
  ServerOptions options;
  Handler handler;
  Doorkeeper doorkeeper;  // may be empty
  Logger log{"net"};
  bool stopping = false;  // no request follows the current one
  // Connections whose handler runs and whose peer is not watched yet, and what will see to that.
  std::vector<ServerConnection*> unwatched = {};
  std::optional<asio::steady_timer> watch_timer = {};
  bool watch_due = false;  // the timer runs
};

class ServerConnection final : public ResponseWriter, public std::enable_shared_from_this<ServerConnection> {
 public:
  ServerConnection(std::shared_ptr<ServerContext> context, asio::ip::tcp::socket socket);
  ~ServerConnection() override { forget_watch(); }
  ServerConnection(const ServerConnection&) = delete;
  ServerConnection& operator=(const ServerConnection&) = delete;

  Task<void> run();        // until the connection is closed
  Task<void> turn_away();  // 503 and close
  bool idle() const;       // between two requests, and no byte of the next has come
  void close_socket() { wire_->close(); }
  void cancel();  // cancels the request being handled and closes the socket

  Task<bool> send(int status, Headers headers, std::string_view body) override;
  Task<bool> start(int status, Headers headers) override;
  Task<bool> write(std::string_view bytes) override;
  Task<bool> write_framed(std::string_view bytes) override;
  std::optional<bool> write_framed_now(std::string_view& bytes) override;
  Task<bool> finish() override;
  Task<bool> finish_framed() override;
  void abort() override;
  bool started() const override { return started_; }
  uint64_t bytes_written() const override { return bytes_written_; }
  bool chunked() const override { return minor_version_ >= 1; }

 private:
  enum class Got { kAll, kClosed, kRefused };
  // Why a request is not handled; the answer says so and the connection closes.
  struct Refusal {
    int status = 0;
    std::string_view code;
    std::string message;
  };

  Task<bool> secure();    // the TLS handshake; false: it failed
  Task<bool> exchange();  // one request and its response; false: the connection is done
  Task<Got> read_head(RequestHead& head);
  Got take_head(size_t bytes, RequestHead& head);
  Got knock(Request& request, std::optional<Task<std::shared_ptr<void>>>& wait);
  Task<Got> wait_at_door(Request& request, Task<std::shared_ptr<void>> wait);
  bool body_is_here(Request& request);  // takes it, if so
  Task<Got> read_body(Request& request);
  Task<Got> read_sized(std::string& body, size_t length);
  Task<Got> read_chunked(std::string& body);
  Got refuse(int status, std::string_view code, std::string message);
  Got refuse(const Error& error);
  Got read_failed(std::string_view what);
  Task<void> send_refusal();
  Task<bool> handle(Request& request);
  Task<void> linger();

  void begin_response(const RequestHead& head);
  void compose_head(int status, Headers& headers, std::optional<size_t> body_bytes);
  bool in_order(bool condition, std::string_view call);
  bool usable() const { return !failed_ && !peer_gone_ && wire_->is_open(); }
  bool put_now(std::span<asio::const_buffer>& buffers);
  Task<bool> put(std::span<asio::const_buffer> buffers);
  void write_failed();

  void begin_watch(Request& request);
  void end_watch();
  void watch_soon();
  void forget_watch();
  void watch();
  void on_readable(SystemError error);
  void poll_hang_up();
  void peer_gone();

  std::shared_ptr<ServerContext> context_;
  std::shared_ptr<Wire> wire_;
  std::string peer_;
  ReadBuffer in_;
  Refusal refusal_;
  bool idle_ = false;

  // The request being handled, if any, and the watch over its peer.
  std::optional<CancelSource> source_;
  std::optional<asio::steady_timer> hang_up_timer_;
  bool watch_armed_ = false;
  static constexpr size_t kNotWaiting = SIZE_MAX;
  size_t unwatched_at_ = kNotWaiting;  // index in the context's list
  bool peer_gone_ = false;

  // The response being written.
  std::string head_;  // reused, so that a long connection does not allocate for each response
  int minor_version_ = 1;
  bool head_request_ = false;
  bool body_allowed_ = true;
  bool keep_open_ = false;
  uint64_t bytes_written_ = 0;
  bool started_ = false;
  bool finished_ = false;
  bool failed_ = false;
};

}  // namespace kindred::net
