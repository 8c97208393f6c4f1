// The messages of Envoy's external processing protocol as the picker sees them, without gRPC.
//
// A stream is one HTTP request: the proxy tells of its headers, body and trailers and then of those of the response,
// and the picker answers each part, or the whole request at once (ToProxy::kImmediate).
//
// Thread-safety: plain values.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "net/http_message.h"

namespace kindred::picker {

// How the proxy sends a body and what it wants back; Envoy's BodySendMode by its numbers.
enum class BodyMode {
  kNone = 0,
  kStreamed = 1,
  kBuffered = 2,
  kBufferedPartial = 3,
  kFullDuplex = 4,
  kGrpc = 5,
};

enum class Part {
  kRequestHeaders,
  kRequestBody,
  kRequestTrailers,
  kResponseHeaders,
  kResponseBody,
  kResponseTrailers,
  kImmediate,  // only to the proxy: it answers the client with this and forgets the request
};

struct FromProxy {
  Part part = Part::kRequestHeaders;
  net::Headers headers = {};  // of headers and trailers; pseudo-headers (":path") among them
  std::string body = {};      // of a body: this piece
  bool end_of_stream = false;
  // The endpoints to choose from, "address:port"; nothing: all.
  std::optional<std::vector<std::string>> subset = {};
  std::string served = {};  // response: the endpoint that answered; empty: not said
  // In the first message, by proxies that tell.
  std::optional<BodyMode> request_mode = {}, response_mode = {};
  bool observing = false;  // nothing we say has any effect
};

struct ToProxy {
  Part part = Part::kRequestHeaders;
  net::Headers set = {};                 // headers, instead of those of that name
  std::vector<std::string> remove = {};  // names
  std::string endpoint = {};             // for the load balancer, as metadata; empty: none
  std::string body = {};
  bool streamed = false;       // `body` takes the place of what came (full duplex)
  bool replaced = false;       // `body` takes the place of the whole (buffered)
  bool end_of_stream = false;  // of a streamed body
  int status = 0;              // of an immediate answer
  std::string details = {};    // for the proxy's access log
};

}  // namespace kindred::picker
