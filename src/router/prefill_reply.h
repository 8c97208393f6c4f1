// The reply of a prefill leg (docs/kindred-dialect.md, section 1) and the handoff made from it.
//
// Thread-safety: plain values and pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/result.h"

namespace kindred::router {

inline constexpr std::string_view kPrefillContentType = "application/vnd.kindred.prefill+json";

// Movable, not copyable: the views point into `bytes_`.
class PrefillReply {
 public:
  // Memory behind the bytes that spares parse() a copy.
  static constexpr size_t kPadding = 64;
  // Untrusted input. Errors: kCorrupt, naming the field.
  static Result<PrefillReply> parse(std::string bytes);

  PrefillReply(PrefillReply&&) = default;
  PrefillReply& operator=(PrefillReply&&) = default;
  PrefillReply(const PrefillReply&) = delete;
  PrefillReply& operator=(const PrefillReply&) = delete;

  bool finished = false;
  std::string content_type;
  std::string first;  // bytes for the client
  uint64_t prompt_tokens = 0;
  uint64_t n = 1;
  std::string fingerprint;
  std::string lease_id;            // empty if finished
  uint64_t lease_ttl_ms = 0;       // 0: not said
  uint64_t releases = 1;           // leases that one call to the worker may release
  std::string_view expert_counts;  // raw JSON with simdjson padding behind it; empty if there are none
  std::string_view lease, state;   // raw JSON, passed on as they are

  // What the decode leg's body carries behind the client's bytes. `from`: URL of the prefill worker.
  std::string handoff(std::string_view from) const;
  // Frees all but what the client is told: no handoff can be made after this.
  void forget_transfer();

 private:
  PrefillReply() = default;
  // Never within the string object itself (it is longer than that), so views survive a move.
  std::string bytes_;
};

}  // namespace kindred::router
