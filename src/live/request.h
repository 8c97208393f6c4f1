// A client's request as a mock worker understands it, and errors in OpenAI's form.
//
// Thread-safety: plain values and pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/result.h"

namespace kindred::live {

struct ApiFailure {
  int status = 500;
  std::string type = "server_error", code = "internal_error", message = {}, param = {};
};
ApiFailure api_failure(const Error& error);
std::string failure_body(const ApiFailure& failure);

struct RequestLimits {
  std::string model;
  uint32_t context_tokens = 32'768;  // prompt and output together
  uint32_t default_output_tokens = 128;
  uint32_t piece_tokens = 16;
};

struct LiveRequest {
  bool chat = false;
  bool stream = false, include_usage = false;
  bool return_expert_counts = false;
  std::vector<uint32_t> tokens;  // of the prompt, at least one
  uint64_t hash = 0;             // of them
  std::vector<uint64_t> pieces;  // empty with cache_prompt: false
  uint32_t output_tokens = 1;
  bool limited = false;               // by the client, so that it ends with "length"
  Json transfer = {};                 // kv_transfer_params (vLLM), or null
  std::optional<uint64_t> room = {};  // bootstrap_room (SGLang)

  uint32_t prompt_tokens() const { return static_cast<uint32_t>(tokens.size()); }
};

// Error: kInvalid, naming the field and what is accepted; kNotFound: another model; kTooLarge: the context.
Result<LiveRequest> parse_live_request(bool chat, std::string_view body, const RequestLimits& limits);
// The tokens of `messages` or `prompt`, for /tokenize. Error: kInvalid.
Result<std::vector<uint32_t>> parse_tokenize(std::string_view body);

}  // namespace kindred::live
