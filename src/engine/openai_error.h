// Errors as OpenAI's clients expect them: {"error":{"message","type","param","code"}}.
//
// Thread-safety: plain values and pure functions.
#pragma once

#include <string>
#include <string_view>

#include "base/result.h"

namespace kindred::engine {

struct ApiError {
  int status = 500;
  std::string type = "server_error";
  std::string code;   // empty: null
  std::string param;  // the field at fault; empty: null
  std::string message;
};

// 400 with a code of ours.
ApiError bad_request(std::string_view code, std::string message, std::string param = {});

// The status and code that belong to an Error of request parsing or of the engine.
ApiError api_error(const Error& error);

std::string render_error(const ApiError& error);

}  // namespace kindred::engine
