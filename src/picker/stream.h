// One stream of a proxy: the conversation, the choice, and what is charged until the stream is over.
//
// A stream is a request like those that come to the router's own port: it takes a place (router/gate.h), is decided by
// the same policies, counts in the same ledger and metrics, and has a line in the access log. API keys are the
// gateway's business and not looked at.
//
// Ownership: by shared_ptr, of the transport and of the coroutine that chooses.
// Thread-safety: confined to the loop's thread.
#pragma once

#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "net/http_server.h"
#include "net/task.h"
#include "picker/choice.h"
#include "picker/conversation.h"
#include "router/core.h"
#include "router/door.h"

namespace kindred::picker {

// The other end of a stream. It hands over one message at a time and the next one only after reply().
class Transport {
 public:
  virtual ~Transport() = default;
  virtual void reply(std::vector<ToProxy> replies) = 0;  // sends these, in their order, then reads on
  virtual void finish() = 0;                             // the stream ends in peace
  virtual void fail(std::string_view why) = 0;           // the proxy is to fail the request
};

struct StreamLimits {
  bool full = false;                               // more streams are open than there may be: the client is told so
  std::chrono::milliseconds request_ms{120'000};   // for the whole request to come and to be decided
  std::chrono::milliseconds stream_ms{3'600'000};  // for the whole stream
};

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  Stream(router::CorePtr core, router::Loop& loop, std::weak_ptr<Transport> transport, StreamLimits limits);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  void receive(FromProxy message);
  void closed();  // the proxy has ended the stream, or is gone

 private:
  class NoWriter;

  void begin(const FromProxy& message);
  net::Task<void> enter(FromProxy message);
  net::Task<void> pick();
  void proceed(Conversation::Step step);
  void answered();
  void refuse(const router::ApiError& error);
  void end(router::Outcome outcome);
  void reply(std::vector<ToProxy> replies);
  void fail(std::string_view why);
  void watch(std::chrono::milliseconds for_ms, std::string_view why);

  router::CorePtr core_;
  router::Loop& loop_;
  std::weak_ptr<Transport> transport_;
  const StreamLimits limits_;
  net::asio::steady_timer deadline_;
  Conversation talk_;
  net::CancelSource gone_;
  net::Request request_;
  std::unique_ptr<NoWriter> writer_;
  std::unique_ptr<router::Admitted> admitted_;  // once its headers are there
  net::CancelToken::Registration preempted_;
  Charge charge_;
  bool answered_ = false, ended_ = false;
};

}  // namespace kindred::picker
