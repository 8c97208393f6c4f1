// Server-sent events (WHATWG HTML §9.2), as far as a relay needs them.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace kindred::net {

// Counts events in a byte stream that arrives in arbitrary pieces, without keeping the bytes. An
// event ends at an empty line; LF, CR LF and CR end lines.
class SseCounter {
 public:
  // Returns how many events ended in `bytes`.
  size_t feed(std::string_view bytes);
  // Whether an event has begun and not ended: nothing may be inserted into the stream now.
  bool inside_event() const { return line_bytes_ > 0 || event_begun_; }

 private:
  size_t line_bytes_ = 0;
  bool event_begun_ = false;
  bool after_cr_ = false;
};

// Splits a stream into the data of its events, for clients (bench, record, demo). Bounded.
class SseSplitter {
 public:
  explicit SseSplitter(size_t limit_bytes = 16 * 1024 * 1024) : limit_bytes_(limit_bytes) {}
  // False if an event is larger than the limit; the splitter is then of no more use.
  bool feed(std::string_view bytes);
  // The `data` of the next complete event, lines joined by LF.
  std::optional<std::string> next();

 private:
  std::string buffer_;
  size_t limit_bytes_;
};

}  // namespace kindred::net
