// Finds the few fields of a request body that routing needs. The body's bytes are never changed:
// workers get them as the client sent them.
//
// Thread-safety: pure function.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/result.h"

namespace kindred::router {

struct RequestScan {
  std::optional<std::string> model;
  bool stream = false;
  uint64_t n = 1;
  std::optional<uint64_t> max_tokens;  // or max_completion_tokens, which wins
  bool wants_counts = false;           // `return_expert_counts` or `return_expert_gates` is true
  // The raw JSON text of `messages`, else of `prompt`: what prefix affinity looks at. Points into the body.
  std::string_view prompt;
};

// `capacity_bytes`: readable bytes from body.data() on; simdjson wants body.size() + 64. With less the
// body is copied.
//
// Errors: kInvalid with `field` named where one is at fault. Refused: what is not a JSON object; a
// field above of the wrong type or given twice (parsers differ in which of two wins, so the router
// and the worker might act on different ones); nesting deeper than 128; and at top level, however its
// name is spelled, any field with which a client could steer the transfer of KV between workers.
Result<RequestScan> scan_request(std::string_view body, size_t capacity_bytes);

// Whether `name` is a field that only the router may set.
bool is_forbidden_field(std::string_view name);

}  // namespace kindred::router
