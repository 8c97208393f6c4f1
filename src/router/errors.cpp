#include "router/errors.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "base/bytes.h"
#include "base/json.h"

namespace kindred::router {
namespace {

std::string json_or_null(std::string_view text) { return text.empty() ? "null" : json_string(text); }

// Anthropic's names, which its SDKs know.
std::string_view messages_type(int status) {
  switch (status) {
    case 401: return "authentication_error";
    case 403: return "permission_error";
    case 404: return "not_found_error";
    case 413: return "request_too_large";
    case 429: return "rate_limit_error";
    case 503: return "overloaded_error";
    case 504: return "timeout_error";
    default: return status < 500 ? "invalid_request_error" : "api_error";
  }
}

std::string error_object(const ApiError& error, std::string_view type) {
  return fmt::format(R"({{"message":{},"type":{},"param":{},"code":{}}})", json_string(error.message),
                     json_string(type), json_or_null(error.param), json_or_null(error.code));
}

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

ApiError endpoint_not_served(std::string_view path, std::string_view model, std::string_view why) {
  ApiError out =
      api_error({ErrorCode::kNotFound, fmt::format("the workers of '{}' do not serve {}: {}", model, path, why)});
  out.code = "endpoint_not_served";
  return out;
}

ApiError bad_worker_reply(std::string message) { return api_error({ErrorCode::kCorrupt, std::move(message)}); }

std::string_view loggable_code(std::string_view code) {
  constexpr std::array<std::string_view, 6> kCodes = {"handoff_invalid", "fingerprint_mismatch", "peer_not_configured",
                                                      "kv_pull_failed",  "queue_full",           "wrong_role"};
  return std::find(kCodes.begin(), kCodes.end(), code) == kCodes.end() ? "a code of its own" : code;
}

std::string error_json(const ApiError& error, ApiForm form) {
  if (form == ApiForm::kMessages) {
    return fmt::format(R"({{"type":"error","error":{}}})", error_object(error, messages_type(error.status)));
  }
  return fmt::format(R"({{"error":{}}})", error_object(error, error.type));
}

std::string error_event(const ApiError& error, ApiForm form, uint64_t sequence) {
  if (form == ApiForm::kOpenAi) return "data: " + error_json(error) + "\n\n";
  if (form == ApiForm::kMessages) return "event: error\ndata: " + error_json(error, form) + "\n\n";
  // As the API has it, flat; and as OpenAI's SDKs look for it, which raise what has an `error`.
  return fmt::format(
      "event: error\ndata: {{\"type\":\"error\",\"sequence_number\":{},\"code\":{},\"message\":{},"
      "\"param\":{},\"error\":{}}}\n\n",
      sequence, json_or_null(error.code), json_string(error.message), json_or_null(error.param),
      error_object(error, error.type));
}

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
