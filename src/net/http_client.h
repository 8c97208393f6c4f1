// HTTP/1.1 client with keep-alive pools, one per endpoint.
//
// Thread-safety: confined to the io_context's thread.
#pragma once

#include <boost/asio/any_io_executor.hpp>
#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/result.h"
#include "net/http_message.h"
#include "net/task.h"

namespace kindred::net {

class Resolver;
class TlsClient;

struct ClientOptions {
  HeadLimits head;
  std::shared_ptr<Resolver> resolver;  // null: the system's
  std::shared_ptr<TlsClient> tls;      // for endpoints that ask for it; null: they are unavailable
  std::string authorization;           // sent where a request has no Authorization of its own; empty: none
  // Connections open to one endpoint at once, idle ones included. A request that finds no room waits its
  // turn, at most wait_timeout_ms, and at most waiters_per_endpoint do.
  size_t connections_per_endpoint = 16'384;
  size_t waiters_per_endpoint = 1'024;
  std::chrono::milliseconds wait_timeout_ms{5'000};
  size_t idle_per_endpoint = 256;
  std::chrono::milliseconds connect_timeout_ms{5'000};
  std::chrono::milliseconds idle_timeout_ms{60'000};  // pooled connections older than this are closed
};

struct RequestDeadlines {
  std::chrono::milliseconds head_ms{600'000};  // from the request's first byte to the end of the response's head
  std::chrono::milliseconds read_ms{120'000};  // between two reads of the body
};

// The response, its body still on the wire. Destroying it before the body's end closes the connection
// (which is how a leg is cancelled); after the end the connection goes back to the pool.
class ClientResponse {
 public:
  virtual ~ClientResponse() = default;
  virtual const ResponseHead& head() const = 0;

  // Some decoded bytes of the body, valid until the next call; empty at its end. Errors: kIo for a cut
  // body (also inside a chunk), kTimeout, kCancelled, kCorrupt for bad framing.
  Task<Result<std::string_view>> read_some();

  // The same bytes as they are on the wire, for verbatim relay of a chunked body.
  struct Framed {
    std::string_view wire;        // chunk framing included; the last chunk too
    bool at_chunk_border = true;  // true if `wire` ends between two chunks (then more may be inserted)
    bool end = false;             // the body is complete
  };
  virtual bool chunked() const = 0;
  Task<Result<Framed>> read_framed();  // only if chunked(); not mixed with read_some()

  // The same in two halves, for who relays many pieces: what is here already, or nothing; then more() waits for
  // bytes, and what went wrong with that is told by the next call.
  virtual std::optional<Result<std::string_view>> some_now() = 0;
  virtual std::optional<Result<Framed>> framed_now() = 0;
  virtual Task<void> more() = 0;

  // Out of head(), when they are needed there no more.
  virtual Headers take_headers() = 0;

  // The rest of the body. Error kTooLarge past `limit_bytes`.
  Task<Result<std::string>> read_all(size_t limit_bytes) { return read_rest(limit_bytes, 0); }
  // The same, with memory for so many bytes more behind it.
  virtual Task<Result<std::string>> read_rest(size_t limit_bytes, size_t spare_bytes) = 0;
  // All of a body that is here already, or nothing: also if it is longer than `limit_bytes`, which read_all() tells.
  virtual std::optional<std::string> all_now(size_t limit_bytes) = 0;

 protected:
  static Error too_large(size_t limit_bytes);
  Task<Result<std::string>> read_pieces(size_t limit_bytes, size_t spare_bytes);
};

class HttpClient {
 public:
  HttpClient(asio::any_io_executor executor, ClientOptions options = {});
  ~HttpClient();

  // Sends the head (Host, Content-Length and Connection are set here) and the body's parts, one after
  // the other without copying them; they must live until the call returns. A pooled connection that
  // turns out to be closed before any byte of the response is replaced by a new one, once.
  // Errors: kUnavailable (refused, unreachable, closed before the head), kTimeout, kCancelled, kCorrupt,
  // kExhausted (no connection to the endpoint became free in time; the peer is not at fault).
  // `cancel` covers the whole exchange, the body included.
  Task<Result<std::unique_ptr<ClientResponse>>> send(const Endpoint& endpoint, RequestHead head,
                                                     std::span<const std::string_view> body, CancelToken cancel,
                                                     RequestDeadlines deadlines = {});

  // GET with a small body, within `timeout_ms` as a whole; the status must be 200 (else kNotFound for
  // 404, kUnavailable for others). For health, metrics and models.
  Task<Result<std::string>> get(const Endpoint& endpoint, std::string target, size_t limit_bytes,
                                std::chrono::milliseconds timeout_ms, CancelToken cancel = {});

  // Closes idle connections, and keeps none from now on. Requests under way go on. For an end in which others than
  // the executor's thread destroy this object.
  void shut_down();

  // For endpoints by name: looks the name up anew, and keeps no connection to an address that it means no more.
  Task<void> refresh(Endpoint endpoint, CancelToken cancel = {});

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace kindred::net
