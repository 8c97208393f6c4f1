// Server-sent events (WHATWG HTML §9.2), for those who read them.
#pragma once

#include <cstddef>
#include <deque>
#include <optional>
#include <string>
#include <string_view>

namespace kindred::net {

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
