// HTTP/1.1 server on one io_context. Several, one per thread, may share one port (share_with).
//
// Each connection is one coroutine; each request runs the handler to its end before the next is read
// (pipelined requests wait in the socket). While a handler runs the connection is watched: if the
// peer closes it (also only its sending side), the request's CancelToken fires. Requests sent ahead
// are taken from the socket up to 64 KiB for that; an end that TCP's flow control holds back behind
// more than these and a full receive window shows only when a write fails.
//
// A handler that throws, does not answer, or calls out of order loses its own connection; it is logged.
//
// Thread-safety: confined to the io_context's thread, except stop() and connections(), which may be called from any.
#pragma once

#include <boost/asio/any_io_executor.hpp>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.h"
#include "net/http_message.h"
#include "net/task.h"

namespace kindred::net {

class TlsServer;

struct ServerOptions {
  HeadLimits head;
  size_t body_bytes = 64 * 1024 * 1024;  // larger bodies: 413
  size_t connections = 16384;            // more: 503 and close; of all servers that share the port
  std::shared_ptr<TlsServer> tls;        // null: in clear
  std::chrono::milliseconds head_timeout_ms{
      30'000};  // from the first byte of a head to its end; also for TLS's handshake
  std::chrono::milliseconds body_timeout_ms{120'000};  // for a whole request body
  std::chrono::milliseconds idle_timeout_ms{75'000};   // between requests
  std::chrono::milliseconds write_timeout_ms{60'000};  // a peer that takes nothing for this long is gone
};

struct Request {
  RequestHead head;
  std::string body;  // whole; capacity exceeds size by kBodyPadding bytes, for simdjson
  CancelToken cancel;
  std::string peer;              // "address:port"
  std::shared_ptr<void> permit;  // what the doorkeeper gave, kept until the response has ended
};
inline constexpr size_t kBodyPadding = 64;

// The response to one request. Exactly one of send() and start() is called by the handler. Every
// write returns false once the peer is gone; the handler then just returns.
class ResponseWriter {
 public:
  virtual ~ResponseWriter() = default;

  // The whole response. Content-Length is added.
  virtual Task<bool> send(int status, Headers headers, std::string_view body) = 0;
  // Head of a streamed response; Transfer-Encoding: chunked is added (HTTP/1.0 peers get close framing).
  virtual Task<bool> start(int status, Headers headers) = 0;
  virtual Task<bool> write(std::string_view bytes) = 0;  // one chunk, on the wire before it returns
  // Bytes that are framed as chunks already (relay); they must begin and, at finish(), end on a chunk border.
  virtual Task<bool> write_framed(std::string_view bytes) = 0;
  // As much of write_framed() as goes without waiting: its result, or nothing where what is now `bytes` is left.
  virtual std::optional<bool> write_framed_now(std::string_view& bytes) = 0;
  virtual Task<bool> finish() = 0;         // the last chunk
  virtual Task<bool> finish_framed() = 0;  // the last chunk has been relayed by write_framed
  // Closes the connection without ending the body, so that the peer sees a cut and not a whole answer.
  virtual void abort() = 0;
  virtual bool started() const = 0;
  virtual uint64_t bytes_written() const = 0;  // head and framing included, as far as the socket took them
  // What the peer speaks: false for HTTP/1.0, where write_framed must not be used.
  virtual bool chunked() const = 0;
};

using Handler = std::function<Task<void>(Request&, ResponseWriter&)>;
// What a doorkeeper says: a permit at once, or a wait that ends with one.
struct Entrance {
  Entrance() = default;
  Entrance(std::shared_ptr<void> its_permit) : permit(std::move(its_permit)) {}
  Entrance(Task<std::shared_ptr<void>> its_wait) : wait(std::move(its_wait)) {}

  std::shared_ptr<void> permit;
  std::optional<Task<std::shared_ptr<void>>> wait;
};
// Called with a request's head before its body is read (and before 100 Continue), with its cancellation. The permit
// becomes Request::permit. If a response has been sent at the end of the wait instead, that is the answer, and the
// connection closes.
using Doorkeeper = std::function<Entrance(Request&, ResponseWriter&)>;

class HttpServer {
 public:
  HttpServer(asio::any_io_executor executor, ServerOptions options, Handler handler, Doorkeeper doorkeeper = {});
  ~HttpServer();  // the io_context must have stopped, or drain() have returned

  // Before listen(): each connection goes to this server or one of `others`, to the one that has fewest. The others
  // do not listen. Each serves on the thread of its own executor, and is stopped and drained there, this one first.
  //
  // One acceptor that hands connections round, and not SO_REUSEPORT for each: the kernel spreads by a hash of
  // addresses, and clients of a router are few and stay for long (gateways), so that one thread may get most of
  // them; what waits in a closing socket's queue would be reset; and a second router on the port would go unnoticed.
  void share_with(const std::vector<HttpServer*>& others);

  // Binds and starts to accept. Port 0 takes a free one. Returns the bound port. Error kIo names
  // address and cause ("port 8000 is in use by another process").
  Result<uint16_t> listen(const std::string& host, uint16_t port);

  void stop();  // accept no more; open connections go on, but close after their current request
  // Waits until all connections are closed, at most `deadline`; then closes what is left.
  Task<void> drain(std::chrono::milliseconds deadline_ms);
  size_t connections() const;  // with those of the servers it shares with

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace kindred::net
