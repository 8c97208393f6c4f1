// Finds the few fields of a request body that routing needs. The body's bytes are never changed:
// workers get them as the client sent them.
//
// Thread-safety: scan_request() is a pure function; a RequestScanner serves one thread.
#pragma once

#include <boost/asio/any_io_executor.hpp>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/result.h"

namespace kindred::router {

struct RequestScan {
  std::optional<std::string> model;
  bool stream = false;
  uint64_t n = 1;
  std::optional<uint64_t> max_tokens;  // or max_completion_tokens, which wins, or max_output_tokens
  bool has_priority = false;           // `priority` is there, and not null
  bool wants_counts = false;           // `return_expert_counts` or `return_expert_gates` is true
  // The raw JSON text of `messages`, else of `prompt`, else of `input`: what prefix affinity looks at. Points into the
  // body.
  std::string_view prompt;
  // The same of `system`, else of `instructions`, which stand before it in Anthropic's API and in Responses.
  std::string_view preamble;

  uint64_t prompt_bytes() const { return preamble.size() + prompt.size(); }
};

// `capacity_bytes`: readable bytes from body.data() on; simdjson wants body.size() + 64. With less the
// body is copied.
//
// Errors: kInvalid with `field` named where one is at fault. Refused: what is not a JSON object; a
// field above of the wrong type or given twice (parsers differ in which of two wins, so the router
// and the worker might act on different ones); a `priority` that is a whole number beyond int64; nesting deeper than
// 128; and at top level and in `vllm_xargs`, however its name is spelled, any field with which a client could steer the
// transfer of KV between workers.
Result<RequestScan> scan_request(std::string_view body, size_t capacity_bytes);

// The same with memory that it keeps from one body to the next, as far as that is worth keeping: a parser's index
// is several times the body.
class RequestScanner {
 public:
  RequestScanner();
  ~RequestScanner();
  RequestScanner(const RequestScanner&) = delete;
  RequestScanner& operator=(const RequestScanner&) = delete;

  Result<RequestScan> scan(std::string_view body, size_t capacity_bytes);

  // That of the executor's context, which lives as long as the context; to be used from its thread.
  static RequestScanner& of(const boost::asio::any_io_executor& executor);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Whether `name` is a field that only the router may set.
bool is_forbidden_field(std::string_view name);

}  // namespace kindred::router
