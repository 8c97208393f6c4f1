#include "router/relay.h"

namespace kindred::router {

net::Task<Result<Piece>> RelaySource::next() {
  if (framed_) {
    Result<net::ClientResponse::Framed> got = co_await from_.read_framed();
    if (!got) co_return std::move(got).error();
    co_return Piece{.bytes = got->wire, .framed = true, .at_border = got->at_chunk_border, .end = got->end};
  }
  Result<std::string_view> got = co_await from_.read_some();
  if (!got) co_return std::move(got).error();
  co_return Piece{.bytes = *got, .framed = false, .at_border = true, .end = got->empty()};
}

void StreamMeter::feed(const Piece& piece) {
  size_t events = 0;
  if (piece.framed) {
    std::string_view wire = piece.bytes;
    while (!wire.empty()) {
      std::string_view payload;
      const size_t used = chunks_.next(wire, payload);
      if (used == 0) break;
      events += counter_.feed(payload);
      if (notes_ != nullptr) notes_->tail.feed(payload);
      wire.remove_prefix(used);
    }
  } else {
    events = counter_.feed(piece.bytes);
    if (notes_ != nullptr) notes_->tail.feed(piece.bytes);
  }
  if (events == 0) return;
  last_ = clock_.now();
  if (notes_ != nullptr) {
    notes_->events += events;
    if (!notes_->first_event) notes_->first_event = last_;
  }
  if (begun_) {
    later_events_ += events;
    return;
  }
  begun_ = true;
  first_ = last_;
  metrics_.ttft_s.observe(seconds_between(arrived_, first_));
}

void StreamMeter::done() {
  // The last event is `[DONE]`, no token.
  if (later_events_ > 1) {
    metrics_.tpot_s.observe(seconds_between(first_, last_) / static_cast<double>(later_events_ - 1));
  }
}

net::Task<RelayResult> relay_stream(RelaySource& source, Piece first, net::ResponseWriter& writer, StreamMeter& meter) {
  Piece piece = first;
  for (;;) {
    meter.feed(piece);
    bool taken = true;
    if (!piece.bytes.empty()) {
      if (piece.framed) taken = co_await writer.write_framed(piece.bytes);
      else taken = co_await writer.write(piece.bytes);
    }
    if (taken && piece.end) {
      // Without chunks or a length a broken stream looks like a finished one, but for an event cut in two.
      if (!piece.framed && meter.inside_event()) {
        co_return RelayResult{RelayEnd::kCut, Error{ErrorCode::kIo, "the stream ended inside an event"}, false};
      }
      if (piece.framed) taken = co_await writer.finish_framed();
      else taken = co_await writer.finish();
      if (taken) meter.done();
      co_return RelayResult{.end = taken ? RelayEnd::kComplete : RelayEnd::kClientGone};
    }
    if (!taken) co_return RelayResult{.end = RelayEnd::kClientGone};
    const bool border = piece.at_border;
    Result<Piece> next = co_await source.next();
    if (!next) {
      const bool gone = next.error().code == ErrorCode::kCancelled;
      co_return RelayResult{gone ? RelayEnd::kClientGone : RelayEnd::kCut, std::move(next).error(),
                            border && !meter.inside_event()};
    }
    piece = *next;
  }
}

}  // namespace kindred::router
