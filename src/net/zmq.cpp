#include "net/zmq.h"

#include <fmt/format.h>
#include <zmq.h>

#include <array>

namespace kindred::net {
namespace {

int type_of(ZmqKind kind) {
  switch (kind) {
    case ZmqKind::kSubscriber: return ZMQ_SUB;
    case ZmqKind::kPublisher: return ZMQ_PUB;
    case ZmqKind::kDealer: return ZMQ_DEALER;
    case ZmqKind::kRouter: return ZMQ_ROUTER;
  }
  return ZMQ_SUB;
}

// One part of a message, owned.
class Part {
 public:
  Part() { zmq_msg_init(&message_); }
  Part(const Part&) = delete;
  Part& operator=(const Part&) = delete;
  ~Part() { zmq_msg_close(&message_); }
  bool receive(void* socket) { return zmq_msg_recv(&message_, socket, ZMQ_DONTWAIT) >= 0; }
  bool more() const { return zmq_msg_more(&message_) != 0; }
  std::string_view bytes() { return {static_cast<const char*>(zmq_msg_data(&message_)), zmq_msg_size(&message_)}; }

 private:
  zmq_msg_t message_;
};

}  // namespace

ZmqContext::ZmqContext() : context_(zmq_ctx_new()) { KINDRED_CHECK(context_ != nullptr); }

void ZmqContext::End::operator()(void* context) const { zmq_ctx_term(context); }

void ZmqSocket::Close::operator()(void* socket) const { zmq_close(socket); }

Result<ZmqSocket> ZmqSocket::open(const ZmqContext& context, ZmqKind kind, const ZmqLimits& limits) {
  void* raw = zmq_socket(context.handle(), type_of(kind));
  if (raw == nullptr) return Error{ErrorCode::kExhausted, fmt::format("ZeroMQ socket: {}", zmq_strerror(zmq_errno()))};
  ZmqSocket socket(raw, limits.parts);
  const int linger_ms = 0, reconnect_ms = 100, reconnect_most_ms = 2000;
  zmq_setsockopt(raw, ZMQ_LINGER, &linger_ms, sizeof(linger_ms));
  zmq_setsockopt(raw, ZMQ_RECONNECT_IVL, &reconnect_ms, sizeof(reconnect_ms));
  zmq_setsockopt(raw, ZMQ_RECONNECT_IVL_MAX, &reconnect_most_ms, sizeof(reconnect_most_ms));
  zmq_setsockopt(raw, ZMQ_RCVHWM, &limits.queue_messages, sizeof(limits.queue_messages));
  zmq_setsockopt(raw, ZMQ_SNDHWM, &limits.queue_messages, sizeof(limits.queue_messages));
  zmq_setsockopt(raw, ZMQ_MAXMSGSIZE, &limits.message_bytes, sizeof(limits.message_bytes));
  if (kind == ZmqKind::kSubscriber) zmq_setsockopt(raw, ZMQ_SUBSCRIBE, "", 0);
  return socket;
}

Result<ZmqSocket> ZmqSocket::connect(const ZmqContext& context, ZmqKind kind, const std::string& endpoint,
                                     const ZmqLimits& limits) {
  Result<ZmqSocket> socket = open(context, kind, limits);
  if (!socket) return socket;
  if (zmq_connect(socket->handle(), endpoint.c_str()) != 0) {
    return invalid(fmt::format("'{}': {}; accepted: tcp://host:port", endpoint, zmq_strerror(zmq_errno())));
  }
  return socket;
}

Result<ZmqSocket> ZmqSocket::bind(const ZmqContext& context, ZmqKind kind, const std::string& endpoint,
                                  const ZmqLimits& limits) {
  Result<ZmqSocket> socket = open(context, kind, limits);
  if (!socket) return socket;
  if (zmq_bind(socket->handle(), endpoint.c_str()) != 0) {
    return invalid(fmt::format("'{}': {}; accepted: tcp://address:port", endpoint, zmq_strerror(zmq_errno())));
  }
  return socket;
}

std::optional<std::vector<std::string>> ZmqSocket::receive() {
  for (;;) {
    std::vector<std::string> parts;
    bool fits = true, more = true;
    while (more) {
      Part part;
      if (!part.receive(socket_.get())) return std::nullopt;
      more = part.more();
      fits = fits && parts.size() < most_parts_;
      if (fits) parts.emplace_back(part.bytes());
    }
    if (fits) return parts;
  }
}

bool ZmqSocket::send(std::span<const std::string_view> parts) {
  for (size_t i = 0; i < parts.size(); ++i) {
    const int flags = ZMQ_DONTWAIT | (i + 1 < parts.size() ? ZMQ_SNDMORE : 0);
    if (zmq_send(socket_.get(), parts[i].data(), parts[i].size(), flags) < 0) return false;
  }
  return true;
}

std::string ZmqSocket::endpoint() const {
  std::array<char, 256> text{};
  size_t size = text.size();
  return zmq_getsockopt(socket_.get(), ZMQ_LAST_ENDPOINT, text.data(), &size) == 0 ? std::string(text.data())
                                                                                   : std::string();
}

}  // namespace kindred::net
