// Looks at the server-sent events of an answer as they pass, without keeping or delaying them.
//
// Cost: two memchr per line and a few comparisons per event. Memory: the first kHeadBytes of the event
// that is passing.
//
// Thread-safety: none; plain values.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "router/api_form.h"

namespace kindred::router {

class StreamWatch {
 public:
  explicit StreamWatch(ApiForm form = ApiForm::kOpenAi) : form_(form) {}

  // Bytes in arbitrary pieces, without chunk framing. An event ends at an empty line; comments alone
  // (keep-alives) are no event.
  void feed(std::string_view bytes);

  uint64_t events() const { return events_; }
  // Events that carry generated text, reasoning or tool calls: not the one that only names the role, not
  // the last ones with finish reason and usage, not `[DONE]`, and none that repeats what deltas have told. Exact
  // where the text begins within the first kHeadBytes of its event.
  uint64_t tokens() const { return tokens_; }
  bool done() const { return done_; }  // the last event was one that ends a stream of this form

  // Whether an event has begun and not ended.
  bool inside_event() const { return inside_line_ || event_begun_; }
  bool inside_line() const { return inside_line_; }
  // Whether empty lines may be put in here. Always between events. Inside one they hand its beginning to
  // the client as if it were whole, so only if that cannot be taken for a whole event: a proper prefix of
  // a JSON object is never JSON, and without data there is no event. `data: [DONE]` without its empty line
  // is the case to fear. Of unnamed events only: to named ones an error is joined otherwise (router/relay.h).
  bool may_end_event() const;

  static constexpr size_t kHeadBytes = 512;

 private:
  void add_to_line(std::string_view bytes);
  void end_line();
  void end_event();
  bool carries_token();
  void keep(std::string_view bytes);
  std::string_view head() const { return {head_.data(), head_size_}; }

  ApiForm form_;
  std::array<char, kHeadBytes> head_{};  // lines of the current event, without comments, joined by LF
  size_t head_size_ = 0;
  size_t token_at_ = 0;  // where in its head the last event had its text: the next one is likely to have it there
  uint64_t events_ = 0, tokens_ = 0;
  bool done_ = false;
  bool inside_line_ = false;
  bool comment_ = false;      // the current line is one
  bool event_begun_ = false;  // a line that is no comment has come since the last event
  bool after_cr_ = false;     // a LF now belongs to the CR before it
};

}  // namespace kindred::router
