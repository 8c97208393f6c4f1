#include "net/server_connection.h"

#include <fmt/format.h>
#include <poll.h>

#include <array>
#include <utility>

#include "base/bytes.h"
#include "net/chunked.h"
#include "net/tls.h"

namespace kindred::net {
namespace {

// A peer may send requests ahead; what is taken out of the socket for them while one is handled.
constexpr size_t kPipelineBytes = 64 * 1024;
constexpr std::chrono::milliseconds kHangUpPoll{250};
// Most requests are over before anybody could leave: watching from the start would cost each a system call.
constexpr std::chrono::milliseconds kWatchAfter{100};
// After an answer that ends the connection early, what still arrives is read for this long: closing
// over unread bytes sends a reset, which can destroy the answer on its way.
constexpr std::chrono::milliseconds kLinger{2'000};
constexpr int kEmptyLinesBefore = 2;  // RFC 9112 §2.2: some clients send one behind a body
constexpr size_t kFirstBodyBytes = 1024 * 1024;

std::string error_body(int status, std::string_view code, std::string_view message) {
  return fmt::format(R"({{"error":{{"message":{},"type":"{}","param":null,"code":"{}"}}}})", json_string(message),
                     status >= 500 ? "server_error" : "invalid_request_error", code);
}

Headers json_headers() {
  Headers headers;
  headers.add("Content-Type", "application/json");
  return headers;
}

}  // namespace

ServerConnection::ServerConnection(std::shared_ptr<ServerContext> context, asio::ip::tcp::socket socket)
    : context_(std::move(context)), wire_(std::make_shared<Wire>(std::move(socket))) {
  wire_->set_options();
  SystemError error;
  const auto remote = wire_->socket().remote_endpoint(error);
  if (!error) peer_ = to_text(remote);
}

Task<void> ServerConnection::run() {
  bool more = true;
  if (context_->options.tls) more = co_await secure();
  while (more) more = co_await exchange();
  wire_->close();
}

Task<bool> ServerConnection::secure() {
  wire_->expire_after(context_->options.head_timeout_ms);
  std::unique_ptr<TlsStream> tls = TlsStream::server(context_->options.tls->current(), wire_->socket().native_handle());
  const SystemError error = co_await wire_->handshake(std::move(tls));
  wire_->clear_deadline();
  co_return !error;
}

Task<bool> ServerConnection::exchange() {
  Request request;
  request.peer = peer_;
  begin_response(request.head);  // what a refusal assumes about a head that cannot be read
  Got got = co_await read_head(request.head);
  if (got == Got::kAll) {
    begin_response(request.head);
    std::optional<Task<std::shared_ptr<void>>> wait;
    got = knock(request, wait);
    if (wait) got = co_await wait_at_door(request, *std::move(wait));
    if (got == Got::kAll && !body_is_here(request)) got = co_await read_body(request);
  }
  wire_->clear_deadline();
  if (got == Got::kClosed) co_return false;
  if (got == Got::kRefused) {
    end_watch();
    co_await send_refusal();
    co_return false;
  }
  co_return co_await handle(request);
}

ServerConnection::Got ServerConnection::refuse(int status, std::string_view code, std::string message) {
  refusal_ = Refusal{status, code, std::move(message)};
  return Got::kRefused;
}

ServerConnection::Got ServerConnection::refuse(const Error& error) {
  if (error.code == ErrorCode::kTooLarge) return refuse(431, "head_too_large", error.message);
  if (error.field == kFieldVersion) return refuse(505, "http_version", error.message);
  if (error.field == kFieldMethod || error.field == kFieldTransferEncoding) {
    return refuse(501, "not_implemented", error.message);
  }
  return refuse(400, "bad_request", error.message);
}

ServerConnection::Got ServerConnection::read_failed(std::string_view what) {
  if (!wire_->expired()) return Got::kClosed;
  return refuse(408, "request_timeout", fmt::format("the request's {} did not arrive in time", what));
}

Task<ServerConnection::Got> ServerConnection::read_head(RequestHead& head) {
  HeadScanner scanner;
  int empty_lines = 0;
  bool begun = false;
  wire_->expire_after(context_->options.idle_timeout_ms);
  for (;;) {
    while (empty_lines < kEmptyLinesBefore && in_.data().starts_with("\r\n")) {
      in_.consume(2);
      scanner = HeadScanner();
      ++empty_lines;
    }
    if (!in_.empty()) {
      if (!begun) wire_->expire_after(context_->options.head_timeout_ms);
      begun = true;
      const HeadScanner::State state = scanner.scan(in_.data());
      if (state == HeadScanner::State::kBareLf)
        co_return refuse(400, "bad_request", "a line of the head ends in a bare LF");
      if (state == HeadScanner::State::kComplete) co_return take_head(scanner.size(), head);
      if (in_.size() > context_->options.head.head_bytes) co_return take_head(in_.size(), head);
    }
    if (context_->stopping && !begun) co_return Got::kClosed;
    idle_ = !begun;
    SystemError error;
    if (wire_->in_clear()) {
      auto [fault, count] = co_await wire_->receive(in_);
      error = wire_->received(in_, fault, count);
    } else {
      co_await wire_->read(in_, error);
    }
    idle_ = false;
    if (error) co_return begun ? read_failed("head") : Got::kClosed;
  }
}

ServerConnection::Got ServerConnection::take_head(size_t bytes, RequestHead& head) {
  auto parsed = parse_request_head(in_.data().substr(0, bytes), context_->options.head);
  if (!parsed) return refuse(parsed.error());
  in_.consume(bytes);
  head = std::move(*parsed);
  return Got::kAll;
}

// Asks the doorkeeper. Where that takes no time the peer is watched from here to the handler's end, unless the body
// must be read first.
ServerConnection::Got ServerConnection::knock(Request& request, std::optional<Task<std::shared_ptr<void>>>& wait) {
  if (!context_->doorkeeper) return Got::kAll;
  const auto framing = request_framing(request.head);
  if (!framing) return refuse(framing.error());
  // Refused anyway, so it need not wait.
  if (framing->length_bytes > context_->options.body_bytes) return Got::kAll;
  wire_->clear_deadline();
  begin_watch(request);
  try {
    Entrance entrance = context_->doorkeeper(request, *this);
    request.permit = std::move(entrance.permit);
    wait = std::move(entrance.wait);
  } catch (const std::exception& fault) {
    context_->log.error("the doorkeeper of {} {} failed: {}", request.head.method, request.head.path(), fault.what());
    return refuse(500, "internal_error", "the server failed to answer this request");
  }
  return Got::kAll;
}

// Meanwhile the peer is watched, as in handle(); what arrives of the body is kept for it.
Task<ServerConnection::Got> ServerConnection::wait_at_door(Request& request, Task<std::shared_ptr<void>> wait) {
  const bool keep_open = std::exchange(keep_open_, false);
  bool threw = false;
  try {
    request.permit = co_await std::move(wait);
  } catch (const std::exception& fault) {
    threw = true;
    context_->log.error("the doorkeeper of {} {} failed: {}", request.head.method, request.head.path(), fault.what());
  }
  end_watch();
  if (!usable()) co_return Got::kClosed;
  if (threw && !started_) co_return refuse(500, "internal_error", "the server failed to answer this request");
  if (started_) {
    if (finished_) co_await linger();
    else abort();
    co_return Got::kClosed;
  }
  keep_open_ = keep_open;
  co_return Got::kAll;
}

// Most requests come in one piece with their head.
bool ServerConnection::body_is_here(Request& request) {
  const auto framing = request_framing(request.head);
  if (!framing || framing->kind != BodyFraming::Kind::kLength || framing->length_bytes > in_.size()) return false;
  if (framing->length_bytes > context_->options.body_bytes || request.head.headers.find("Expect") != nullptr) {
    return false;
  }
  const auto length = static_cast<size_t>(framing->length_bytes);
  request.body.reserve(length + kBodyPadding);
  request.body.assign(in_.data().substr(0, length));
  in_.consume(length);
  return true;
}

Task<ServerConnection::Got> ServerConnection::read_body(Request& request) {
  end_watch();
  const auto framing = request_framing(request.head);
  if (!framing) co_return refuse(framing.error());
  const std::string_view* expect = request.head.headers.find("Expect");
  const bool expects_continue = expect != nullptr && equals_ignore_case(*expect, "100-continue");
  if (expect != nullptr && !expects_continue) {
    co_return refuse(417, "expectation_failed", "the only expectation accepted is \"100-continue\"");
  }
  if (framing->kind == BodyFraming::Kind::kNone) {
    request.body.reserve(kBodyPadding);
    co_return Got::kAll;
  }
  const size_t limit = context_->options.body_bytes;
  if (framing->kind == BodyFraming::Kind::kLength && framing->length_bytes > limit) {
    co_return refuse(413, "body_too_large", fmt::format("the body is larger than {} bytes", limit));
  }
  wire_->expire_after(context_->options.body_timeout_ms);
  if (expects_continue && minor_version_ >= 1 && in_.empty()) {
    std::array<asio::const_buffer, 1> interim = {asio::buffer(std::string_view("HTTP/1.1 100 Continue\r\n\r\n"))};
    const SystemError error = co_await wire_->write(interim, std::nullopt);
    if (error) co_return Got::kClosed;
  }
  Got got = Got::kClosed;
  if (framing->kind == BodyFraming::Kind::kLength) {
    got = co_await read_sized(request.body, static_cast<size_t>(framing->length_bytes));
  } else {
    got = co_await read_chunked(request.body);
  }
  request.body.reserve(request.body.size() + kBodyPadding);
  co_return got;
}

Task<ServerConnection::Got> ServerConnection::read_sized(std::string& body, size_t length) {
  body.reserve(std::min(length, kFirstBodyBytes) + kBodyPadding);
  size_t filled = std::min(length, in_.size());
  body.assign(in_.data().substr(0, filled));
  in_.consume(filled);
  while (filled < length) {
    if (filled == body.size()) {
      // Memory follows the bytes that came, not the length that was claimed.
      const size_t target = std::min(length, std::max(kFirstBodyBytes, 2 * filled));
      body.reserve(target + kBodyPadding);
      body.resize(target);
    }
    size_t count = 0;
    const SystemError error = co_await wire_->read(std::span(body).subspan(filled), count);
    if (error) co_return read_failed("body");
    filled += count;
  }
  co_return Got::kAll;
}

Task<ServerConnection::Got> ServerConnection::read_chunked(std::string& body) {
  ChunkTracker tracker;
  for (;;) {
    const ChunkTracker::Decoded decoded = tracker.decode_in_place(in_.mutable_data());
    if (tracker.failed()) co_return refuse(400, "bad_request", "the chunked body is malformed");
    if (decoded.payload_bytes > context_->options.body_bytes - body.size()) {
      co_return refuse(413, "body_too_large",
                       fmt::format("the body is larger than {} bytes", context_->options.body_bytes));
    }
    body.append(in_.data().substr(0, decoded.payload_bytes));
    in_.consume(decoded.consumed);
    if (tracker.done()) co_return Got::kAll;
    const SystemError error = co_await wire_->read(in_);
    if (error) co_return read_failed("body");
  }
}

Task<void> ServerConnection::send_refusal() {
  keep_open_ = false;
  const std::string body = error_body(refusal_.status, refusal_.code, refusal_.message);
  const bool sent = co_await send(refusal_.status, json_headers(), body);
  if (sent) co_await linger();
}

Task<void> ServerConnection::turn_away() {
  if (context_->options.tls) {  // not worth a handshake
    wire_->close();
    co_return;
  }
  refuse(503, "too_many_connections", "the server has no room for another connection");
  co_await send_refusal();
  wire_->close();
}

Task<void> ServerConnection::linger() {
  wire_->shut_down_write();
  wire_->expire_after(kLinger);
  SystemError error;
  while (!error) {
    in_.consume(in_.size());
    error = co_await wire_->read(in_);
  }
}

Task<bool> ServerConnection::handle(Request& request) {
  if (!source_) begin_watch(request);
  bool threw = false;
  try {
    co_await context_->handler(request, *this);
  } catch (const std::exception& fault) {
    threw = true;
    context_->log.error("the handler of {} {} failed: {}", request.head.method, request.head.path(), fault.what());
  } catch (...) {
    threw = true;
    context_->log.error("the handler of {} {} failed", request.head.method, request.head.path());
  }
  end_watch();
  if (!started_ && usable()) {
    if (!threw) context_->log.error("the handler of {} {} did not answer", request.head.method, request.head.path());
    keep_open_ = false;
    const std::string body = error_body(500, "internal_error", "the server failed to answer this request");
    co_await send(500, json_headers(), body);
  }
  if (!finished_) abort();
  if (!usable()) co_return false;
  if (!keep_open_ && !in_.empty()) co_await linger();
  co_return keep_open_;
}

bool ServerConnection::idle() const {
  SystemError error;
  return idle_ && wire_->socket().available(error) == 0;
}

void ServerConnection::cancel() {
  peer_gone_ = true;
  if (source_) source_->cancel();
  wire_->close();
}

// ---- The watch: a handler may run for minutes without writing, and must hear that its peer left.

void ServerConnection::begin_watch(Request& request) {
  source_.emplace();
  request.cancel = source_->token();
  watch_soon();
}

void ServerConnection::end_watch() {
  source_.reset();
  forget_watch();
  if (hang_up_timer_) hang_up_timer_->cancel();
}

void ServerConnection::watch_soon() {
  // A wait left over from the request before serves for this one too; none is taken back when a request
  // ends, which spares another system call.
  if (watch_armed_) return;
  ServerContext& context = *context_;
  unwatched_at_ = context.unwatched.size();
  context.unwatched.push_back(this);
  if (std::exchange(context.watch_due, true)) return;
  if (!context.watch_timer) context.watch_timer.emplace(wire_->socket().get_executor());
  context.watch_timer->expires_after(kWatchAfter);
  context.watch_timer->async_wait([weak = std::weak_ptr(context_)](SystemError error) {
    const std::shared_ptr<ServerContext> shared = weak.lock();
    if (!shared) return;
    shared->watch_due = false;
    if (error) return;
    for (ServerConnection* connection : std::exchange(shared->unwatched, {})) {
      connection->unwatched_at_ = kNotWaiting;
      connection->watch();
    }
  });
}

void ServerConnection::forget_watch() {
  if (unwatched_at_ == kNotWaiting) return;
  std::vector<ServerConnection*>& all = context_->unwatched;
  all[unwatched_at_] = all.back();
  all[unwatched_at_]->unwatched_at_ = unwatched_at_;
  all.pop_back();
  unwatched_at_ = kNotWaiting;
}

void ServerConnection::watch() {
  watch_armed_ = true;
  wire_->socket().async_wait(asio::ip::tcp::socket::wait_read, [self = shared_from_this()](SystemError error) {
    self->watch_armed_ = false;
    // An exception must not leave a callback: it would end the thread's loop and all connections.
    try {
      self->on_readable(error);
    } catch (const std::exception& fault) {
      self->context_->log.error("a connection was aborted: {}", fault.what());
      self->abort();
    }
  });
}

void ServerConnection::on_readable(SystemError error) {
  if (!source_ || error == asio::error::operation_aborted) return;
  if (error) return peer_gone();
  // Pipelined bytes are taken out of the socket: behind them an end would go unnoticed, and the wait
  // would be over at once each time.
  if (in_.size() >= kPipelineBytes) return poll_hang_up();
  const std::span<char> room = in_.prepare();
  size_t count = 0;
  error = wire_->read_now(room, count);
  in_.commit(count);
  if (error && error != asio::error::would_block) return peer_gone();
  watch();
}

void ServerConnection::poll_hang_up() {
  pollfd entry{wire_->socket().native_handle(), POLLRDHUP, 0};
  if (::poll(&entry, 1, 0) > 0) return peer_gone();
  if (!hang_up_timer_) hang_up_timer_.emplace(wire_->socket().get_executor());
  hang_up_timer_->expires_after(kHangUpPoll);
  hang_up_timer_->async_wait([self = shared_from_this()](SystemError error) {
    if (!error && self->source_ && self->wire_->is_open()) self->poll_hang_up();
  });
}

void ServerConnection::peer_gone() {
  peer_gone_ = true;
  if (source_) source_->cancel();
}

}  // namespace kindred::net
