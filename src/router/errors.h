// The one place where errors become HTTP: status, OpenAI's or Anthropic's error object, and its form inside a stream.
//
// Thread-safety: plain values and pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/result.h"
#include "router/api_form.h"

namespace kindred::router {

struct ApiError {
  int status = 500;
  std::string type;
  std::string code;  // stable; clients may compare it
  std::string message;
  std::string param = {};  // the field at fault, or empty
  int retry_after_s = 0;   // 0: no Retry-After
  std::string allow = {};  // 405 only: the Allow header
  bool shed = false;       // a limit of the router's own was reached
};

// kCorrupt and kIo are faults of a worker here: 502.
ApiError api_error(const Error& error);

// Named ones, whose code is not the ErrorCode's.
ApiError model_not_found(std::string_view model, std::string_view served);
ApiError no_worker(std::string message);  // 503 no_worker_available
ApiError bad_worker_reply(std::string message);

// 404: no worker of the model has this endpoint.
ApiError endpoint_not_served(std::string_view path, std::string_view model, std::string_view why);

std::string error_json(const ApiError& error, ApiForm form = ApiForm::kOpenAi);
// One SSE event with its empty line: `data: {"error":{…}}`, where events have names behind `event: error`. `sequence`:
// the events before it, which Responses streams number.
std::string error_event(const ApiError& error, ApiForm form = ApiForm::kOpenAi, uint64_t sequence = 0);

// What an upstream said in OpenAI's error form; empty where it did not.
struct UpstreamError {
  std::string code, message;
};
UpstreamError parse_upstream_error(std::string_view body);
// `code` if it is one of the dialect's (docs/kindred-dialect.md), for a log; of others nobody knows what a worker
// puts there.
std::string_view loggable_code(std::string_view code);

}  // namespace kindred::router
