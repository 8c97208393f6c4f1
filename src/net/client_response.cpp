#include "net/client_response.h"

#include <fmt/format.h>

#include <algorithm>

namespace kindred::net {
namespace {

constexpr std::string_view kAnswerBegin = "HTTP/1.";
constexpr size_t kFirstAnswerBytes = 1024 * 1024;  // of memory for a body whose length is known

}  // namespace

PooledResponse::PooledResponse(std::weak_ptr<ClientPool> pool, Endpoint endpoint, std::shared_ptr<Wire> wire,
                               CancelToken cancel, RequestDeadlines deadlines)
    : pool_(std::move(pool)), endpoint_(std::move(endpoint)), wire_(std::move(wire)), deadlines_(deadlines) {
  if (const auto owner = pool_.lock()) {
    limits_ = owner->options().head;
    in_ = owner->take_buffer();
  }
  cancel_ = cancel.on_cancel([target = wire_] { target->cancel(); });
}

PooledResponse::~PooledResponse() {
  if (wire_) wire_->close();
  if (const auto owner = pool_.lock()) owner->give_buffer(std::move(in_));
}

Task<Status> PooledResponse::exchange(std::span<asio::const_buffer> request, std::string_view method) {
  wire_->expire_after(deadlines_.head_ms);
  // Nearly always the socket takes it all at once.
  SystemError written = wire_->write_now(request);
  if (written == asio::error::would_block) written = co_await wire_->write(request, std::nullopt);
  // A peer may answer before it has read all of the request, and close: the answer is worth more than
  // the fault, but the connection carries no other request.
  if (written) reusable_ = false;
  HeadScanner scanner;
  for (;;) {
    const Result<bool> taken = take_head(scanner);
    if (!taken) co_return taken.error();
    if (*taken) co_return begin_body(method);
    SystemError error;
    if (wire_->in_clear()) {
      auto [fault, count] = co_await wire_->receive(in_);
      error = wire_->received(in_, fault, count);
    } else {
      co_await wire_->read(in_, error);
    }
    if (error) co_return head_failed(error);
  }
}

void PooledResponse::hold(ClientPool::Place place) {
  if (wire_) place_ = std::move(place);
}

Result<bool> PooledResponse::take_head(HeadScanner& scanner) {
  for (;;) {
    const HeadScanner::State state = scanner.scan(in_.data());
    if (state == HeadScanner::State::kBareLf) return head_corrupt("a line of the head ends in a bare LF");
    if (state == HeadScanner::State::kMore) {
      if (in_.size() > limits_.head_bytes) return fail(ErrorCode::kCorrupt, "the head is too large");
      return false;
    }
    auto parsed = parse_response_head(in_.data().substr(0, scanner.size()), limits_);
    if (!parsed) return head_corrupt(parsed.error().message);
    in_.consume(scanner.size());
    head_ = std::move(*parsed);
    if (head_.status >= 200) return true;
    if (head_.status == 101) return fail(ErrorCode::kCorrupt, "it switches to a protocol that was not asked for");
    scanner = HeadScanner();  // an interim response; the final one follows
  }
}

Status PooledResponse::begin_body(std::string_view method) {
  const auto framing = response_framing(head_, method);
  if (!framing) return fail(ErrorCode::kCorrupt, framing.error().message);
  framing_ = *framing;
  keep_alive_ = keep_alive(head_);
  length_left_ = framing_.length_bytes;
  phase_ = Phase::kBody;
  wire_->clear_deadline();
  const bool empty =
      framing_.kind == BodyFraming::Kind::kNone || (framing_.kind == BodyFraming::Kind::kLength && length_left_ == 0);
  if (empty) end_body();
  return {};
}

Task<void> PooledResponse::more() {
  drop_given();
  if (chunked()) in_.expect_little();
  wire_->expire_after(deadlines_.read_ms);
  return wire_->read(in_, wait_error_);
}

bool PooledResponse::after_wait() {
  if (wait_error_) return false;
  wire_->clear_deadline();
  if (!wire_->cancelled()) return true;
  wait_error_ = asio::error::operation_aborted;
  return false;
}

void PooledResponse::drop_given() {
  in_.consume(given_);
  given_ = 0;
}

std::optional<Result<std::string_view>> PooledResponse::some_now() {
  drop_given();
  if (phase_ == Phase::kEnd) return std::string_view();
  if (phase_ == Phase::kFailed) return failure_;
  if (!after_wait()) {
    if (wait_error_ != asio::error::eof || framing_.kind != BodyFraming::Kind::kUntilClose) {
      return body_failed(wait_error_);
    }
    end_body();
    return std::string_view();
  }
  Result<std::string_view> payload = take_payload();
  if (payload && payload->empty() && phase_ != Phase::kEnd) return std::nullopt;
  return payload;
}

Result<std::string_view> PooledResponse::take_payload() {
  size_t payload_bytes = in_.size();
  given_ = payload_bytes;
  bool end = false;
  if (framing_.kind == BodyFraming::Kind::kLength) {
    given_ = payload_bytes = static_cast<size_t>(std::min<uint64_t>(length_left_, in_.size()));
    length_left_ -= payload_bytes;
    end = length_left_ == 0;
  } else if (chunked()) {
    const ChunkTracker::Decoded decoded = tracker_.decode_in_place(in_.mutable_data());
    if (tracker_.failed()) return fail(ErrorCode::kCorrupt, "a chunk of the body is malformed");
    payload_bytes = decoded.payload_bytes;
    given_ = decoded.consumed;
    end = tracker_.done();
  }
  const std::string_view payload = in_.data().substr(0, payload_bytes);
  if (end) end_body();
  return payload;
}

std::optional<std::string> PooledResponse::all_now(size_t limit_bytes) {
  drop_given();
  if (phase_ == Phase::kEnd) return std::string();
  if (phase_ != Phase::kBody || framing_.kind != BodyFraming::Kind::kLength) return std::nullopt;
  if (length_left_ > std::min(in_.size(), limit_bytes)) return std::nullopt;
  given_ = static_cast<size_t>(length_left_);
  length_left_ = 0;
  std::string body(in_.data().substr(0, given_));
  end_body();
  return body;
}

Task<Result<std::string>> PooledResponse::read_rest(size_t limit_bytes, size_t spare_bytes) {
  drop_given();
  const bool sized = phase_ == Phase::kBody && framing_.kind == BodyFraming::Kind::kLength && length_left_ > 0;
  if (!sized) co_return co_await read_pieces(limit_bytes, spare_bytes);
  if (length_left_ > limit_bytes) co_return too_large(limit_bytes);
  const auto length = static_cast<size_t>(length_left_);
  std::string body;
  body.reserve(std::min(length, kFirstAnswerBytes) + spare_bytes);
  size_t filled = std::min(length, in_.size());
  body.assign(in_.data().substr(0, filled));
  given_ = filled;
  // The rest goes where it is to stay, in few reads.
  while (filled < length) {
    if (filled == body.size()) {
      // Memory follows the bytes that came, not the length that was claimed.
      const size_t target = std::min(length, std::max(kFirstAnswerBytes, 2 * filled));
      body.reserve(target + spare_bytes);
      body.resize(target);
    }
    drop_given();
    wire_->expire_after(deadlines_.read_ms);
    size_t count = 0;
    wait_error_ = co_await wire_->read(std::span(body).subspan(filled), count);
    if (!after_wait()) co_return body_failed(wait_error_);
    filled += count;
    length_left_ -= count;
  }
  length_left_ = 0;
  end_body();
  co_return body;
}

std::optional<Result<ClientResponse::Framed>> PooledResponse::framed_now() {
  KINDRED_CHECK(chunked());
  drop_given();
  if (phase_ == Phase::kEnd) return Framed{{}, false, true};
  if (phase_ == Phase::kFailed) return failure_;
  if (!after_wait()) return body_failed(wait_error_);
  if (in_.empty()) return std::nullopt;
  given_ = tracker_.track(in_.data());
  if (tracker_.failed()) return fail(ErrorCode::kCorrupt, "a chunk of the body is malformed");
  const Framed framed{in_.data().substr(0, given_), tracker_.at_border(), tracker_.done()};
  if (framed.end) end_body();
  return framed;
}

// Where the body is complete: the connection goes back, and may be another request's from here on.
void PooledResponse::end_body() {
  phase_ = Phase::kEnd;
  cancel_ = CancelToken::Registration();
  const std::shared_ptr<Wire> wire = std::move(wire_);
  const auto pool = pool_.lock();
  const bool unasked_bytes = in_.size() > given_;
  const bool keep = pool && reusable_ && !unasked_bytes && keep_alive_ && !wire->cancelled() &&
                    framing_.kind != BodyFraming::Kind::kUntilClose;
  if (keep) pool->put_back(endpoint_, wire);
  else wire->close();
  place_.give_back();
}

Error PooledResponse::fail(ErrorCode code, std::string_view what) {
  failure_ = Error{code, fmt::format("response of {}: {}", endpoint_.text(), what)};
  phase_ = Phase::kFailed;
  wire_->close();
  place_.give_back();
  return failure_;
}

// Whether what has come can be no answer: on a connection that carried one before, it may be what the peer sent behind
// that.
bool PooledResponse::no_answer() const {
  const size_t seen = std::min(in_.size(), kAnswerBegin.size());
  return head_.status == 0 && (seen == 0 || in_.data().substr(0, seen) != kAnswerBegin.substr(0, seen));
}

Error PooledResponse::head_corrupt(std::string_view what) {
  stale_ = no_answer();
  return fail(ErrorCode::kCorrupt, what);
}

Error PooledResponse::head_failed(SystemError error) {
  if (wire_->cancelled()) return fail(ErrorCode::kCancelled, "the request was cancelled");
  if (wire_->expired()) return fail(ErrorCode::kTimeout, "no head arrived in time");
  stale_ = no_answer();
  return fail(ErrorCode::kUnavailable,
              fmt::format("the connection was closed before the head was complete ({})", error.message()));
}

Error PooledResponse::body_failed(SystemError error) {
  if (wire_->cancelled()) return fail(ErrorCode::kCancelled, "the request was cancelled");
  if (wire_->expired()) return fail(ErrorCode::kTimeout, "the body stalled");
  return fail(ErrorCode::kIo, fmt::format("the connection was closed inside the body ({})", error.message()));
}

}  // namespace kindred::net
