#include "engine/openai_error.h"

#include "base/bytes.h"

namespace kindred::engine {

ApiError bad_request(std::string_view code, std::string message, std::string param) {
  return {400, "invalid_request_error", std::string(code), std::move(param), std::move(message)};
}

ApiError api_error(const Error& error) {
  switch (error.code) {
    case ErrorCode::kInvalid: return bad_request("invalid_value", error.message, error.field);
    // The one bound that a well-formed request can pass is the context; bodies are bounded by the server.
    case ErrorCode::kTooLarge: return bad_request("context_length_exceeded", error.message, error.field);
    case ErrorCode::kNotFound:
      return {404, "invalid_request_error", error.field == "model" ? "model_not_found" : "not_found", error.field,
              error.message};
    case ErrorCode::kExhausted: return {429, "rate_limit_error", "queue_full", {}, error.message};
    case ErrorCode::kUnavailable: return {503, "service_unavailable_error", "unavailable", {}, error.message};
    case ErrorCode::kTimeout: return {504, "timeout_error", "timeout", {}, error.message};
    case ErrorCode::kCancelled: return {503, "service_unavailable_error", "cancelled", {}, error.message};
    case ErrorCode::kCorrupt:
    case ErrorCode::kIo:
    case ErrorCode::kInternal: break;
  }
  return {500, "server_error", "internal_error", {}, error.message};
}

std::string render_error(const ApiError& error) {
  const auto append = [](std::string& out, std::string_view text) {
    if (text.empty()) {
      out += "null";
    } else {
      append_json_string(out, text);
    }
  };
  std::string out = R"({"error":{"message":)";
  append_json_string(out, error.message);
  out += R"(,"type":)";
  append_json_string(out, error.type);
  out += R"(,"param":)";
  append(out, error.param);
  out += R"(,"code":)";
  append(out, error.code);
  return out + "}}";
}

}  // namespace kindred::engine
