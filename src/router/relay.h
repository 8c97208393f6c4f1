// Relays a worker's event stream to the client as it is, and watches it pass by.
//
// Thread-safety: none; one stream each.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "base/result.h"
#include "net/chunked.h"
#include "net/http_client.h"
#include "net/http_server.h"
#include "net/task.h"
#include "router/request_notes.h"
#include "router/router_metrics.h"
#include "router/stream_watch.h"

namespace kindred::router {

// A piece of a worker's body in the form in which it goes to the client.
struct Piece {
  std::string_view bytes;  // valid until the next piece is read
  bool framed = false;     // with its chunk framing
  bool end = false;
};

// Reads pieces: verbatim where both sides speak chunks, decoded where one does not.
class RelaySource {
 public:
  // `has_end_mark`: the protocol says by an event that a stream is whole (StreamWatch::done).
  RelaySource(net::ClientResponse& from, const net::ResponseWriter& to, bool has_end_mark)
      : from_(from),
        framed_(from.chunked() && to.chunked()),
        needs_done_(has_end_mark && !from.chunked() && from.head().headers.find("Content-Length") == nullptr) {}

  net::Task<Result<Piece>> next();
  // The same in two halves, so that a piece needs no coroutine of its own: what is here already, or nothing; then
  // more() waits for it.
  std::optional<Result<Piece>> now();
  net::Task<void> more() { return from_.more(); }
  // Nothing but that event tells the end of this body from a worker's death.
  bool needs_done() const { return needs_done_; }

 private:
  net::ClientResponse& from_;
  bool framed_;
  bool needs_done_;
};

// Where a broken stream can be joined by an event of ours: `framed` goes out first, as it is, then
// `payload` and the event.
//
// Unnamed events: empty lines end what has begun. Named ones: the error takes the place of what has begun, since of
// two `event` lines in one event the last counts; so even a `message_stop` without its empty line ends nothing, and a
// broken delta reaches the client under the name of the error only.
struct Bridge {
  std::string framed;
  std::string_view payload;
};

// Follows one stream: where an event of ours may stand, time to first token, time per output token.
class StreamMeter {
 public:
  // `choices`: `n` of the request; their tokens come in turn.
  StreamMeter(const Clock& clock, MonotonicTime arrived, RouterMetrics& metrics, uint64_t choices, ApiForm form)
      : clock_(clock), arrived_(arrived), metrics_(metrics), choices_(choices), form_(form), watch_(form) {}

  void feed(const Piece& piece);
  void note_in(RequestNotes* notes) { notes_ = notes; }  // null: nowhere
  void done();                                           // the stream ended whole
  const StreamWatch& watch() const { return watch_; }
  // Nothing where an event of ours would make what came before it look whole, or break the framing: then
  // the client sees the cut only.
  std::optional<Bridge> bridge() const;

 private:
  const Clock& clock_;
  MonotonicTime arrived_;
  RouterMetrics& metrics_;
  uint64_t choices_;
  ApiForm form_;
  StreamWatch watch_;
  RequestNotes* notes_ = nullptr;
  net::ChunkTracker chunks_;
  MonotonicTime first_token_, last_token_;
  uint64_t first_tokens_ = 0;  // that came in one piece with the first
};

enum class RelayEnd {
  kComplete,
  kClientGone,
  kCut,  // the worker's stream broke
};

struct RelayResult {
  RelayEnd end = RelayEnd::kComplete;
  Error error = {};  // kCut
};

// Relays `first`, then the rest of `source`. A response must have been started. On kCut nothing more
// has been written.
net::Task<RelayResult> relay_stream(RelaySource& source, Piece first, net::ResponseWriter& writer, StreamMeter& meter);

}  // namespace kindred::router
