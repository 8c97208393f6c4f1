// What is said on one stream between a proxy and the picker: the endpoint picker protocol of the Gateway API
// Inference Extension (its proposal 004), over Envoy's ext_proc. A pure state machine: messages in, messages out.
//
// Request. The headers are answered once the request is whole, because only its body says what it asks for: then
// come, in this order, the answer to the headers, the body in pieces, and the trailers if there were any (full duplex;
// also what a proxy gets that does not name its mode). A proxy that buffers gets an empty answer to the headers and the
// choice with the body. In the other modes a header can be changed only before the body is there: they are answered at
// once, by a choice that knows nothing of the body.
// Response. All of it passes unchanged. What it tells: that the leg has been answered, by whom, and when it ended.
//
// Bounds: a body of at most `body_bytes` is kept, until the choice is sent.
// Errors: none here; a stream on which parts come in an impossible order is `broken` and to be closed.
// Thread-safety: none; one per stream.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "net/http_message.h"
#include "picker/message.h"
#include "router/errors.h"

namespace kindred::picker {

// Where the request goes.
struct Picked {
  std::string endpoint;                  // "address:port"
  net::Headers set = {};                 // beside the endpoint's own header
  std::vector<std::string> remove = {};  // what only the picker may say
  std::string body = {};                 // all of it, as it goes on
  bool changed = false;                  // it is not what came
};

inline constexpr std::string_view kEndpointHeader = "x-gateway-destination-endpoint";
inline constexpr std::string_view kPrefillerHeader = "x-prefiller-host-port";  // llm-d's, for its routing sidecar
// Of a streamed body. Envoy takes pieces of up to 64 KiB.
inline constexpr size_t kPieceBytes = 48 * 1024;

class Conversation {
 public:
  enum class Event {
    kNone,
    kChoose,    // the request is there: chosen() or refuse() comes next, and no message before that
    kAnswered,  // the head of the response: `status`, `served`
    kProgress,  // a piece of its body
    kEnded,     // the response is over; `whole` unless the proxy gave up
    kBroken,    // close the stream
    kLetGo,     // end the stream in peace: the proxy only watches
  };
  struct Step {
    Event event = Event::kNone;
    std::vector<ToProxy> replies = {};
  };

  explicit Conversation(size_t body_bytes) : body_bytes_(body_bytes) {}

  Step on(FromProxy message);
  std::vector<ToProxy> chosen(Picked picked);
  // Answers the client with this error, in OpenAI's form. What was shed is a 429, whatever the error says.
  std::vector<ToProxy> refuse(const router::ApiError& error);

  const net::Headers& headers() const { return headers_; }  // of the request
  std::string take_body() { return std::move(body_); }
  const std::optional<std::vector<std::string>>& subset() const { return subset_; }
  // Whether the body was there to choose by, or there is none.
  bool body_seen() const { return !has_body_ || holds_back() || request_mode_ == BodyMode::kBuffered; }
  int status() const { return status_; }                 // of the response; 0: none yet
  const std::string& served() const { return served_; }  // empty: not said
  // The proxy shows no body of the response: where it ends can only be told by the end of the stream.
  bool ends_unseen() const { return status_ != 0 && response_mode_ == BodyMode::kNone; }

 private:
  enum class State { kFresh, kBody, kChoosing, kSent, kRefused };

  Step request_headers(FromProxy message);
  Step request_body(FromProxy message);
  Step response_headers(const FromProxy& message);
  Step response_body(FromProxy message);
  Step too_long();
  bool holds_back() const { return request_mode_ == BodyMode::kFullDuplex; }

  const size_t body_bytes_;
  State state_ = State::kFresh;
  BodyMode request_mode_ = BodyMode::kFullDuplex, response_mode_ = BodyMode::kFullDuplex;
  net::Headers headers_;
  std::string body_;
  std::optional<std::vector<std::string>> subset_;
  bool has_body_ = false, has_trailers_ = false;
  int status_ = 0;
  std::string served_;
  bool ended_ = false;
};

}  // namespace kindred::picker
