// What is remembered of a request for those who watch: access log, rate limits, traces. No text of prompt or
// output.
//
// Thread-safety: none; one request each.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/clock.h"

namespace kindred::router {

struct TokenUsage {
  std::optional<uint64_t> prompt_tokens, output_tokens;
};

// Reads the last `"usage": {…}` of an OpenAI or Anthropic answer, or of the end of a stream of events. In a
// JSON string the quotes would be escaped, so content cannot pass for it.
TokenUsage usage_in(std::string_view text);

// The end of a stream, where its usage is if the client asked for it, or the API tells it anyway.
class StreamTail {
 public:
  static constexpr size_t kKeptBytes = 1024;

  void feed(std::string_view bytes);
  std::string_view bytes() const { return kept_; }

 private:
  std::string kept_;  // at most twice as much, so that most pieces move nothing
};

// The beginning of a stream, where Anthropic's API tells what the prompt came to.
class StreamHead {
 public:
  static constexpr size_t kKeptBytes = 1024;

  void feed(std::string_view bytes) { kept_ += bytes.substr(0, kKeptBytes - kept_.size()); }
  std::string_view bytes() const { return kept_; }

 private:
  std::string kept_;
};

struct RequestNotes {
  bool watched = false;                       // whether anybody will read them
  uint64_t body_bytes = 0;                    // of the request
  std::string prefill_worker, decode_worker;  // URLs; of a plain request the second
  std::string policy, reason;                 // of the last decision
  TokenUsage usage;                           // as far as workers told
  uint64_t events = 0;                        // of the stream that was relayed
  std::optional<MonotonicTime> first_event, last_event;
  StreamHead head;
  StreamTail tail;

  void feed(std::string_view bytes) {  // of the stream
    head.feed(bytes);
    tail.feed(bytes);
  }

  // With what was counted where nothing was told.
  TokenUsage best_usage() const;
};

}  // namespace kindred::router
