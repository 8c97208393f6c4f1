#include "router/relay.h"

namespace kindred::router {
namespace {

// A chunk that broke off is filled up with empty lines only if it is not larger than any event should be.
constexpr uint64_t kMaxFillBytes = 64 * 1024;

}  // namespace

std::optional<Result<Piece>> RelaySource::now() {
  if (framed_) {
    std::optional<Result<net::ClientResponse::Framed>> got = from_.framed_now();
    if (!got) return std::nullopt;
    if (!*got) return std::move(*got).error();
    return Piece{.bytes = (*got)->wire, .framed = true, .end = (*got)->end};
  }
  std::optional<Result<std::string_view>> got = from_.some_now();
  if (!got) return std::nullopt;
  if (!*got) return std::move(*got).error();
  return Piece{.bytes = **got, .framed = false, .end = (*got)->empty()};
}

net::Task<Result<Piece>> RelaySource::next() {
  std::optional<Result<Piece>> piece = now();
  while (!piece) {
    co_await more();
    piece = now();
  }
  co_return *std::move(piece);
}

void StreamMeter::feed(const Piece& piece) {
  const uint64_t events = watch_.events(), tokens = watch_.tokens();
  if (piece.framed) {
    std::string_view wire = piece.bytes;
    while (!wire.empty()) {
      std::string_view payload;
      const size_t used = chunks_.next(wire, payload);
      if (used == 0) break;
      watch_.feed(payload);
      if (notes_ != nullptr) notes_->feed(payload);
      wire.remove_prefix(used);
    }
  } else {
    watch_.feed(piece.bytes);
    if (notes_ != nullptr) notes_->feed(piece.bytes);
  }
  if (watch_.events() == events) return;
  const MonotonicTime now = clock_.now();
  metrics_.stream_events.add(static_cast<double>(watch_.events() - events));
  if (notes_ != nullptr) {
    notes_->events = watch_.events();
    if (!notes_->first_event) notes_->first_event = now;
    notes_->last_event = now;
  }
  if (events == 0) metrics_.ttft_s.observe(seconds_between(arrived_, now));
  if (watch_.tokens() == tokens) return;
  last_token_ = now;
  if (tokens > 0) return;
  first_token_ = now;
  first_tokens_ = watch_.tokens();
}

void StreamMeter::done() {
  const uint64_t later = watch_.tokens() - first_tokens_;
  if (later == 0) return;
  const auto per_choice = static_cast<double>(later) / static_cast<double>(choices_);
  metrics_.tpot_s.observe(seconds_between(first_token_, last_token_) / per_choice);
}

std::optional<Bridge> StreamMeter::bridge() const {
  const std::optional<net::ChunkTracker::Gap> gap = chunks_.gap();
  if (!gap || gap->payload_bytes > kMaxFillBytes) return std::nullopt;
  Bridge out;
  if (names_events(form_)) {
    // The line that broke off ends, and a comment fills the rest of the chunk.
    bool inside_line = watch_.inside_line();
    out.framed.assign(gap->payload_bytes, ':');
    if (inside_line && !out.framed.empty()) {
      out.framed.front() = '\n';
      inside_line = false;
    }
    inside_line = inside_line || out.framed.ends_with(':');
    if (inside_line) out.payload = "\n";
  } else {
    if (!watch_.may_end_event()) return std::nullopt;
    // Empty lines between events mean nothing, so they fill the chunk and end the event in one.
    out.framed.assign(gap->payload_bytes, '\n');
    if (watch_.inside_event()) out.payload = "\n\n";
  }
  out.framed += gap->framing;
  return out;
}

net::Task<RelayResult> relay_stream(RelaySource& source, Piece first, net::ResponseWriter& writer, StreamMeter& meter) {
  Piece piece = first;
  for (;;) {
    meter.feed(piece);
    bool taken = true;
    if (!piece.bytes.empty()) {
      const std::optional<bool> now = piece.framed ? writer.write_framed_now(piece.bytes) : std::nullopt;
      if (now) taken = *now;
      else if (piece.framed) taken = co_await writer.write_framed(piece.bytes);
      else taken = co_await writer.write(piece.bytes);
    }
    if (taken && piece.end) {
      // Without chunks or a length a broken stream looks like a finished one.
      const StreamWatch& watch = meter.watch();
      if (!piece.framed && (watch.inside_event() || (source.needs_done() && !watch.done()))) {
        co_return RelayResult{RelayEnd::kCut, Error{ErrorCode::kIo, "the stream ended before its last event"}};
      }
      if (piece.framed) taken = co_await writer.finish_framed();
      else taken = co_await writer.finish();
      if (taken) meter.done();
      co_return RelayResult{.end = taken ? RelayEnd::kComplete : RelayEnd::kClientGone};
    }
    if (!taken) co_return RelayResult{.end = RelayEnd::kClientGone};
    std::optional<Result<Piece>> next = source.now();
    while (!next) {
      co_await source.more();
      next = source.now();
    }
    if (!*next) {
      const bool gone = next->error().code == ErrorCode::kCancelled;
      co_return RelayResult{gone ? RelayEnd::kClientGone : RelayEnd::kCut, std::move(*next).error()};
    }
    piece = **next;
  }
}

}  // namespace kindred::router
