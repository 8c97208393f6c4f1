// Server-sent events (WHATWG HTML §9.2), as far as a relay needs them.
#pragma once

#include <cstddef>
#include <deque>
#include <optional>
#include <string>
#include <string_view>

namespace kindred::net {

// Counts events in a byte stream that arrives in arbitrary pieces, without keeping the bytes. An
// event ends at an empty line; LF, CR LF and CR end lines. Comments alone (keep-alives) are no event.
class SseCounter {
 public:
  // Returns how many events ended in `bytes`.
  size_t feed(std::string_view bytes);
  // Whether an event has begun and not ended: nothing may be inserted into the stream now.
  bool inside_event() const { return inside_line_ || event_begun_; }

 private:
  size_t end_line();
  void add_to_line(std::string_view bytes);

  bool inside_line_ = false;
  bool comment_ = false;      // the current line is one
  bool event_begun_ = false;  // a line that is no comment has come since the last event
  bool after_cr_ = false;     // a LF now belongs to the CR before it
};

// Splits a stream into the data of its events, for clients (bench, record, demo). Bounded.
class SseSplitter {
 public:
  explicit SseSplitter(size_t limit_bytes = 16 * 1024 * 1024) : limit_bytes_(limit_bytes) {}
  // False if an event is larger than the limit; the splitter is then of no more use: false for ever.
  bool feed(std::string_view bytes);
  // The `data` of the next complete event, lines joined by LF.
  std::optional<std::string> next();

 private:
  bool add_to_line(std::string_view bytes);
  void end_line();

  std::string line_;  // begun and not ended
  std::string data_;  // of the current event, each line with a LF behind it
  bool has_data_ = false;
  bool after_cr_ = false;
  bool failed_ = false;
  std::deque<std::string> ready_;
  size_t limit_bytes_;
};

}  // namespace kindred::net
