// One exchange of an HttpClient: sends the request, reads the response's head, then its body.
//
// Owns its connection until the body's end. Confined to its executor's thread.
#pragma once

#include <memory>
#include <span>
#include <string_view>

#include "net/chunked.h"
#include "net/client_pool.h"
#include "net/http_client.h"
#include "net/read_buffer.h"
#include "net/wire.h"

namespace kindred::net {

class PooledResponse final : public ClientResponse {
 public:
  PooledResponse(std::weak_ptr<ClientPool> pool, Endpoint endpoint, std::shared_ptr<Wire> wire, CancelToken cancel,
                 RequestDeadlines deadlines);
  ~PooledResponse() override;
  PooledResponse(const PooledResponse&) = delete;
  PooledResponse& operator=(const PooledResponse&) = delete;

  // Writes `request` (which it uses up) and reads the head. To be called once, first.
  Task<Status> exchange(std::span<asio::const_buffer> request, std::string_view method);
  // The connection's place in the pool, kept until the body's end.
  void hold(ClientPool::Place place);
  // After a failed exchange: the connection was of no use already. The peer had closed it before it answered
  // anything, or what lay in it is no answer.
  bool stale() const { return stale_; }

  const ResponseHead& head() const override { return head_; }
  std::optional<Result<std::string_view>> some_now() override;
  bool chunked() const override { return framing_.kind == BodyFraming::Kind::kChunked; }
  std::optional<Result<Framed>> framed_now() override;
  Task<void> more() override;
  Headers take_headers() override { return std::move(head_.headers); }
  std::optional<std::string> all_now(size_t limit_bytes) override;
  Task<Result<std::string>> read_rest(size_t limit_bytes, size_t spare_bytes) override;

 private:
  enum class Phase { kHead, kBody, kEnd, kFailed };

  Result<bool> take_head(HeadScanner& scanner);  // false: more bytes are needed
  Status begin_body(std::string_view method);
  bool after_wait();  // false: it failed with wait_error_
  void drop_given();
  Result<std::string_view> take_payload();
  Error fail(ErrorCode code, std::string_view what);
  bool no_answer() const;
  Error head_corrupt(std::string_view what);
  Error head_failed(SystemError error);
  Error body_failed(SystemError error);
  void end_body();

  std::weak_ptr<ClientPool> pool_;
  Endpoint endpoint_;
  std::shared_ptr<Wire> wire_;  // nullptr after the end of the body
  ClientPool::Place place_;
  CancelToken::Registration cancel_;
  RequestDeadlines deadlines_;
  HeadLimits limits_;

  ReadBuffer in_;
  size_t given_ = 0;  // bytes at the front of in_ that the caller may be looking at
  ResponseHead head_;
  BodyFraming framing_;
  uint64_t length_left_ = 0;
  ChunkTracker tracker_;
  Phase phase_ = Phase::kHead;
  Error failure_;
  SystemError wait_error_;
  bool keep_alive_ = false;  // as the head says
  bool reusable_ = true;     // the whole request was taken, so the connection can carry another
  bool stale_ = false;
};

}  // namespace kindred::net
