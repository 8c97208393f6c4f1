// Relays a worker's event stream to the client as it is, and watches it pass by.
//
// Thread-safety: none; one stream each.
#pragma once

#include <optional>
#include <string_view>

#include "base/clock.h"
#include "base/result.h"
#include "net/chunked.h"
#include "net/http_client.h"
#include "net/http_server.h"
#include "net/sse.h"
#include "net/task.h"
#include "router/request_notes.h"
#include "router/router_metrics.h"

namespace kindred::router {

// A piece of a worker's body in the form in which it goes to the client.
struct Piece {
  std::string_view bytes;  // valid until the next piece is read
  bool framed = false;     // with its chunk framing
  bool at_border = true;   // an event of ours could follow here
  bool end = false;
};

// Reads pieces: verbatim where both sides speak chunks, decoded where one does not.
class RelaySource {
 public:
  RelaySource(net::ClientResponse& from, const net::ResponseWriter& to)
      : from_(from), framed_(from.chunked() && to.chunked()) {}

  net::Task<Result<Piece>> next();

 private:
  net::ClientResponse& from_;
  bool framed_;
};

// Measures time to first token and time per output token from the events that pass.
class StreamMeter {
 public:
  StreamMeter(const Clock& clock, MonotonicTime arrived, RouterMetrics& metrics)
      : clock_(clock), arrived_(arrived), metrics_(metrics) {}

  void feed(const Piece& piece);
  void note_in(RequestNotes* notes) { notes_ = notes; }  // null: nowhere
  void done();                                           // the stream ended whole
  bool inside_event() const { return counter_.inside_event(); }

 private:
  const Clock& clock_;
  MonotonicTime arrived_;
  RouterMetrics& metrics_;
  RequestNotes* notes_ = nullptr;
  net::SseCounter counter_;
  net::ChunkTracker chunks_;
  MonotonicTime first_, last_;
  size_t later_events_ = 0;  // after those that came with the first
  bool begun_ = false;
};

enum class RelayEnd {
  kComplete,
  kClientGone,
  kCut,  // the worker's stream broke
};

struct RelayResult {
  RelayEnd end = RelayEnd::kComplete;
  Error error = {};               // kCut
  bool may_insert_event = false;  // kCut: the client's stream is between two events
};

// Relays `first`, then the rest of `source`. A response must have been started. On kCut nothing more
// has been written.
net::Task<RelayResult> relay_stream(RelaySource& source, Piece first, net::ResponseWriter& writer, StreamMeter& meter);

}  // namespace kindred::router
