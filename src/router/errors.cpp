#include "router/errors.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "base/bytes.h"
#include "base/json.h"

namespace kindred::router {
namespace {

std::string json_or_null(std::string_view text) { return text.empty() ? "null" : json_string(text); }

}  // namespace

ApiError api_error(const Error& error) {
  const auto make = [&](int status, std::string_view type, std::string_view code) {
    ApiError out;
    out.status = status;
    out.type = type;
    out.code = code;
    out.message = error.message;
    out.param = error.field;
    return out;
  };
  switch (error.code) {
    case ErrorCode::kInvalid: return make(400, "invalid_request_error", "invalid_value");
    case ErrorCode::kNotFound: return make(404, "invalid_request_error", "not_found");
    case ErrorCode::kTooLarge: return make(413, "invalid_request_error", "request_too_large");
    case ErrorCode::kExhausted: {
      ApiError out = make(429, "rate_limit_error", "router_busy");
      out.retry_after_s = 1;
      out.shed = true;
      return out;
    }
    case ErrorCode::kUnavailable: return make(503, "service_unavailable_error", "worker_unavailable");
    case ErrorCode::kTimeout: return make(504, "timeout_error", "worker_timeout");
    // Nobody is there to read it; the number is nginx's.
    case ErrorCode::kCancelled: return make(499, "server_error", "client_closed_request");
    case ErrorCode::kCorrupt:
    case ErrorCode::kIo: return make(502, "server_error", "bad_gateway");
    case ErrorCode::kInternal: break;
  }
  return make(500, "server_error", "internal_error");
}

ApiError model_not_found(std::string_view model, std::string_view served) {
  ApiError out = api_error({ErrorCode::kNotFound, {}, "model"});
  out.code = "model_not_found";
  out.message = model.empty() ? fmt::format("'model' is required; served here: {}", served)
                              : fmt::format("the model '{}' does not exist; served here: {}", model, served);
  return out;
}

ApiError no_worker(std::string message) {
  ApiError out = api_error({ErrorCode::kUnavailable, std::move(message)});
  out.code = "no_worker_available";
  out.retry_after_s = 1;
  return out;
}

ApiError bad_worker_reply(std::string message) { return api_error({ErrorCode::kCorrupt, std::move(message)}); }

std::string_view loggable_code(std::string_view code) {
  constexpr std::array<std::string_view, 6> kCodes = {"handoff_invalid", "fingerprint_mismatch", "peer_not_configured",
                                                      "kv_pull_failed",  "queue_full",           "wrong_role"};
  return std::find(kCodes.begin(), kCodes.end(), code) == kCodes.end() ? "a code of its own" : code;
}

std::string error_json(const ApiError& error) {
  return fmt::format(R"({{"error":{{"message":{},"type":{},"param":{},"code":{}}}}})", json_string(error.message),
                     json_string(error.type), json_or_null(error.param), json_or_null(error.code));
}

std::string error_event(const ApiError& error) { return "data: " + error_json(error) + "\n\n"; }

UpstreamError parse_upstream_error(std::string_view body) {
  const auto root = parse_json(body);
  if (!root.is_object()) return {};
  // vLLM before 0.10 puts the fields at the top.
  const auto found = root.find("error");
  const auto& error = found != root.end() && found->is_object() ? *found : root;
  const auto text = [&](const char* name) {
    const auto it = error.find(name);
    return it != error.end() && it->is_string() ? it->get<std::string>() : std::string();
  };
  return {text("code"), text("message")};
}

}  // namespace kindred::router
