// The writing half of a ServerConnection: one response, in order, whole or streamed.

#include <fmt/format.h>

#include <array>

#include "net/server_connection.h"

namespace kindred::net {
namespace {

size_t bytes_in(std::span<const asio::const_buffer> buffers) {
  size_t sum = 0;
  for (const asio::const_buffer& buffer : buffers) sum += buffer.size();
  return sum;
}

}  // namespace

void ServerConnection::begin_response(const RequestHead& head) {
  minor_version_ = head.minor_version;
  head_request_ = head.method == "HEAD";
  body_allowed_ = !head_request_;
  keep_open_ = keep_alive(head);
  started_ = finished_ = false;
  bytes_written_ = 0;
}

// With `body_bytes` a whole response, without a streamed one.
void ServerConnection::compose_head(int status, Headers& headers, std::optional<size_t> body_bytes) {
  started_ = true;
  const bool bodiless = status < 200 || status == 204 || status == 304;
  if (bodiless) body_allowed_ = false;
  const std::string_view* connection = headers.find("Connection");
  if (context_->stopping || (connection != nullptr && equals_ignore_case(*connection, "close"))) keep_open_ = false;
  const bool close_framed = !body_bytes && body_allowed_ && !chunked();
  if (close_framed) keep_open_ = false;
  headers.erase("Connection");
  headers.erase("Content-Length");
  headers.erase("Transfer-Encoding");

  head_.clear();
  head_ += "HTTP/1.1 ";
  append_number(head_, static_cast<uint64_t>(status));
  head_ += ' ';
  head_ += reason_phrase(status);
  head_ += "\r\n";
  for (const Header& header : headers) append_header_line(head_, header.name, header.value);
  if (!bodiless) {
    if (body_bytes) {
      head_ += "Content-Length: ";
      append_number(head_, *body_bytes);
      head_ += "\r\n";
    } else if (chunked()) {
      head_ += "Transfer-Encoding: chunked\r\n";
    }
  }
  if (!keep_open_) {
    head_ += "Connection: close\r\n";
  } else if (minor_version_ == 0) {
    head_ += "Connection: keep-alive\r\n";
  }
  head_ += "\r\n";
}

void ServerConnection::write_failed() {
  failed_ = true;
  if (source_) source_->cancel();
}

// True once there is no more to do, as all is written or the connection failed.
bool ServerConnection::put_now(std::span<asio::const_buffer>& buffers) {
  if (!usable()) return true;
  const size_t before = bytes_in(buffers);
  const SystemError error = wire_->write_now(buffers);
  bytes_written_ += before - bytes_in(buffers);
  if (error == asio::error::would_block) return false;
  if (error) write_failed();
  return true;
}

Task<bool> ServerConnection::put(std::span<asio::const_buffer> buffers) {
  if (!put_now(buffers)) {
    const size_t left = bytes_in(buffers);
    const SystemError error = co_await wire_->write(buffers, context_->options.write_timeout_ms);
    if (error) write_failed();
    else bytes_written_ += left;
  }
  co_return usable();
}

// A handler that calls out of order is a bug, but takes no more than its own connection down.
bool ServerConnection::in_order(bool condition, std::string_view call) {
  if (condition) return true;
  context_->log.error("a handler called {}() out of order", call);
  abort();
  return false;
}

Task<bool> ServerConnection::send(int status, Headers headers, std::string_view body) {
  if (!in_order(!started_, "send")) co_return false;
  compose_head(status, headers, body.size());
  finished_ = true;
  std::array<asio::const_buffer, 2> parts = {asio::buffer(head_), asio::buffer(body_allowed_ ? body : "")};
  std::span<asio::const_buffer> left = parts;
  if (put_now(left)) co_return usable();
  co_return co_await put(left);
}

Task<bool> ServerConnection::start(int status, Headers headers) {
  if (!in_order(!started_, "start")) co_return false;
  in_.release_if_empty();  // a stream may last for minutes, with thousands beside it
  compose_head(status, headers, std::nullopt);
  std::array<asio::const_buffer, 1> parts = {asio::buffer(head_)};
  co_return co_await put(parts);
}

Task<bool> ServerConnection::write(std::string_view bytes) {
  if (!in_order(started_ && !finished_, "write")) co_return false;
  // An empty chunk would end the body.
  if (bytes.empty() || !body_allowed_) co_return usable();
  std::array<char, 20> size_line;
  const auto end = fmt::format_to(size_line.data(), "{:x}\r\n", bytes.size());
  const std::string_view before = chunked() ? std::string_view(size_line.data(), end) : "";
  const std::string_view after = chunked() ? "\r\n" : "";
  std::array<asio::const_buffer, 3> parts = {asio::buffer(before), asio::buffer(bytes), asio::buffer(after)};
  std::span<asio::const_buffer> left = parts;
  // Nearly always the socket takes it all at once, without one more coroutine.
  if (put_now(left)) co_return usable();
  co_return co_await put(left);
}

std::optional<bool> ServerConnection::write_framed_now(std::string_view& bytes) {
  if (!in_order(started_ && !finished_ && chunked(), "write_framed")) return false;
  if (!body_allowed_) return usable();
  std::array<asio::const_buffer, 1> parts = {asio::buffer(bytes)};
  std::span<asio::const_buffer> left = parts;
  if (put_now(left)) return usable();
  bytes = {static_cast<const char*>(left.front().data()), left.front().size()};
  return std::nullopt;
}

Task<bool> ServerConnection::write_framed(std::string_view bytes) {
  if (const std::optional<bool> now = write_framed_now(bytes)) co_return *now;
  std::array<asio::const_buffer, 1> parts = {asio::buffer(bytes)};
  co_return co_await put(parts);
}

Task<bool> ServerConnection::finish() {
  if (!in_order(started_ && !finished_, "finish")) co_return false;
  finished_ = true;
  if (!body_allowed_ || !chunked()) co_return usable();
  std::array<asio::const_buffer, 1> parts = {asio::buffer(std::string_view("0\r\n\r\n"))};
  co_return co_await put(parts);
}

Task<bool> ServerConnection::finish_framed() {
  if (!in_order(started_ && !finished_ && chunked(), "finish_framed")) co_return false;
  finished_ = true;
  co_return usable();
}

void ServerConnection::abort() {
  failed_ = true;
  // Where the body ends with the connection, an orderly close would look like the whole of it.
  if (started_ && !finished_ && body_allowed_ && !chunked()) return wire_->reset();
  wire_->close();
}

}  // namespace kindred::net
