#include "net/http_client.h"

#include <fmt/format.h>

#include <algorithm>
#include <boost/asio/steady_timer.hpp>

#include "net/client_pool.h"
#include "net/client_response.h"

namespace kindred::net {
namespace {

std::string compose_head(const Endpoint& endpoint, const RequestHead& head, size_t body_bytes,
                         const std::string& authorization) {
  std::string text;
  size_t bytes = 256;  // what is not the client's
  bytes += head.headers.bytes() + 4 * head.headers.size();
  text.reserve(bytes + head.target.size());
  // The request line is made of what a parser has accepted or our own code wrote; a target with a
  // space or a line end in it must still not become another request.
  text += head.method;
  text += ' ';
  const size_t target_at = text.size();
  text += head.target;
  std::replace_if(
      text.begin() + static_cast<std::ptrdiff_t>(target_at), text.end(),
      [](char c) { return static_cast<unsigned char>(c) <= ' ' || c == 0x7f; }, '_');
  text += " HTTP/1.1\r\n";
  append_header_line(text, "Host", endpoint.text());
  for (const Header& header : head.headers) {
    const std::string_view name = header.name;
    if (equals_ignore_case(name, "Host") || equals_ignore_case(name, "Content-Length") ||
        equals_ignore_case(name, "Transfer-Encoding") || equals_ignore_case(name, "Connection")) {
      continue;
    }
    append_header_line(text, name, header.value);
  }
  if (!authorization.empty() && head.headers.find("Authorization") == nullptr) {
    append_header_line(text, "Authorization", authorization);
  }
  if (body_bytes > 0 || (head.method != "GET" && head.method != "HEAD")) {
    text += "Content-Length: ";
    append_number(text, body_bytes);
    text += "\r\n";
  }
  text += "Connection: keep-alive\r\n\r\n";
  return text;
}

// The pieces of a request, for one gathered write.
std::vector<asio::const_buffer> gather(std::string_view head, std::span<const std::string_view> body) {
  std::vector<asio::const_buffer> buffers;
  buffers.reserve(body.size() + 1);
  buffers.push_back(asio::buffer(head));
  for (const std::string_view part : body) buffers.push_back(asio::buffer(part));
  return buffers;
}

}  // namespace

struct HttpClient::Impl : ClientPool {
  using ClientPool::ClientPool;
};

HttpClient::HttpClient(asio::any_io_executor executor, ClientOptions options)
    : impl_(std::make_shared<Impl>(std::move(executor), options)) {}

HttpClient::~HttpClient() { impl_->shut_down(); }

void HttpClient::shut_down() { impl_->shut_down(); }

Task<Result<std::unique_ptr<ClientResponse>>> HttpClient::send(const Endpoint& endpoint, RequestHead head,
                                                               std::span<const std::string_view> body,
                                                               CancelToken cancel, RequestDeadlines deadlines) {
  const std::shared_ptr<Impl> pool = impl_;
  const Endpoint to = endpoint;
  size_t body_bytes = 0;
  for (const std::string_view part : body) body_bytes += part.size();
  const std::string head_text = compose_head(to, head, body_bytes, pool->options().authorization);
  std::optional<ClientPool::Place> place = pool->enter_now(to);
  if (!place) {
    auto later = co_await pool->enter(to, cancel);
    if (!later) co_return std::move(later).error();
    place = *std::move(later);
  }
  bool may_reuse = true;
  for (;;) {
    if (cancel.cancelled()) {
      co_return Error{ErrorCode::kCancelled, fmt::format("the request to {} was cancelled", to.text())};
    }
    std::shared_ptr<Wire> wire;
    if (may_reuse) wire = pool->take(to);
    const bool reused = wire != nullptr;
    if (!reused) {
      auto connected = co_await pool->connect(to, cancel);
      if (!connected) co_return std::move(connected).error();
      wire = std::move(*connected);
    }
    auto response = std::make_unique<PooledResponse>(pool, to, std::move(wire), cancel, deadlines);
    std::vector<asio::const_buffer> buffers = gather(head_text, body);
    const Status exchanged = co_await response->exchange(buffers, head.method);
    if (exchanged) {
      response->hold(*std::move(place));
      co_return std::unique_ptr<ClientResponse>(std::move(response));
    }
    // The peer may close an idle connection at any time, also just as a request is on its way to it.
    if (!reused || !response->stale()) co_return exchanged.error();
    may_reuse = false;
  }
}

Task<void> HttpClient::refresh(Endpoint endpoint, CancelToken cancel) {
  const std::shared_ptr<Impl> pool = impl_;
  co_await pool->refresh(std::move(endpoint), std::move(cancel));
}

Task<Result<std::string>> HttpClient::get(const Endpoint& endpoint, std::string target, size_t limit_bytes,
                                          std::chrono::milliseconds timeout_ms, CancelToken cancel) {
  const Endpoint to = endpoint;
  // One deadline over connect, head and body, by way of a cancellation of its own.
  CancelSource source;
  const auto registration = cancel.on_cancel([&source] { source.cancel(); });
  const auto expired = std::make_shared<bool>(false);
  asio::steady_timer timer(impl_->executor(), timeout_ms);
  timer.async_wait([source, expired](SystemError error) mutable {
    if (error) return;
    *expired = true;
    source.cancel();
  });

  RequestHead head;
  head.method = "GET";
  head.target = std::move(target);
  Error error;
  auto response = co_await send(to, std::move(head), {}, source.token(), RequestDeadlines{timeout_ms, timeout_ms});
  if (response) {
    const int status = (*response)->head().status;
    auto body = co_await (*response)->read_all(limit_bytes);
    if (body && status == 200) co_return body;
    error = body ? Error{status == 404 ? ErrorCode::kNotFound : ErrorCode::kUnavailable,
                         fmt::format("{} answered with status {}", to.text(), status)}
                 : std::move(body).error();
  } else {
    error = std::move(response).error();
  }
  if (*expired && !cancel.cancelled()) {
    error = Error{ErrorCode::kTimeout, fmt::format("{} did not answer within {} ms", to.text(), timeout_ms.count())};
  }
  co_return error;
}

Task<Result<std::string_view>> ClientResponse::read_some() {
  std::optional<Result<std::string_view>> piece = some_now();
  while (!piece) {
    co_await more();
    piece = some_now();
  }
  co_return *std::move(piece);
}

Task<Result<ClientResponse::Framed>> ClientResponse::read_framed() {
  std::optional<Result<Framed>> piece = framed_now();
  while (!piece) {
    co_await more();
    piece = framed_now();
  }
  co_return *std::move(piece);
}

Error ClientResponse::too_large(size_t limit_bytes) {
  return Error{ErrorCode::kTooLarge, fmt::format("the response is larger than {} bytes", limit_bytes)};
}

Task<Result<std::string>> ClientResponse::read_pieces(size_t limit_bytes, size_t spare_bytes) {
  std::string body;
  for (;;) {
    const std::optional<Result<std::string_view>> piece = some_now();
    if (!piece) {
      co_await more();
      continue;
    }
    if (!*piece) co_return piece->error();
    if ((*piece)->empty()) {
      body.reserve(body.size() + spare_bytes);
      co_return body;
    }
    if ((*piece)->size() > limit_bytes - body.size()) co_return too_large(limit_bytes);
    body += **piece;
  }
}

}  // namespace kindred::net
