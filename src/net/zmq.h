// Sockets of ZeroMQ: owned, bounded, without exceptions.
//
// Thread-safety: a context may be shared; a socket is used by one thread at a time.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace kindred::net {

class ZmqContext {
 public:
  ZmqContext();
  void* handle() const { return context_.get(); }

 private:
  struct End {
    void operator()(void* context) const;
  };
  std::unique_ptr<void, End> context_;
};

enum class ZmqKind { kSubscriber, kPublisher, kDealer, kRouter };

struct ZmqLimits {
  int queue_messages = 256;
  int64_t message_bytes = 4LL << 20;  // a peer that sends longer ones is cut off
  size_t parts = 8;                   // of a message; one of more is dropped
};

class ZmqSocket {
 public:
  // Connecting never waits: the peer may come later, and come back. `endpoint`: "tcp://host:port".
  // Error: kInvalid, naming the endpoint.
  static Result<ZmqSocket> connect(const ZmqContext& context, ZmqKind kind, const std::string& endpoint,
                                   const ZmqLimits& limits = {});
  static Result<ZmqSocket> bind(const ZmqContext& context, ZmqKind kind, const std::string& endpoint,
                                const ZmqLimits& limits = {});

  // The parts of the next message, if one is there. Does not wait.
  std::optional<std::vector<std::string>> receive();
  // False: the queue is full, or nobody is there to take it.
  bool send(std::span<const std::string_view> parts);
  std::string endpoint() const;  // the one it is bound to, with its port

  void* handle() const { return socket_.get(); }

 private:
  struct Close {
    void operator()(void* socket) const;
  };
  ZmqSocket(void* socket, size_t parts) : socket_(socket), most_parts_(parts) {}
  static Result<ZmqSocket> open(const ZmqContext& context, ZmqKind kind, const ZmqLimits& limits);

  std::unique_ptr<void, Close> socket_;
  size_t most_parts_;
};

}  // namespace kindred::net
