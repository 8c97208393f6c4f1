// Bodies of /v1/chat/completions and /v1/completions, parsed and validated. The bodies are untrusted;
// every field is checked for type and range before anything is allocated for it, and an error names
// the field, what was given and what is accepted.
//
// Fields that this server does not know are ignored, as OpenAI-compatible servers do. Fields that
// would change the answer in a way it cannot deliver (tools, structured output, several prompts) and
// fields that belong between router and workers (kv_transfer_params, bootstrap_*) are errors.
//
// Thread-safety: plain values and pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "engine/types.h"

namespace kindred::engine {

enum class Api { kChat, kCompletions };

inline constexpr uint32_t kMaxChoices = 16;
inline constexpr size_t kMaxStopStrings = 16;
inline constexpr size_t kMaxStopBytes = 1024;  // of one stop string
inline constexpr int32_t kMaxLogprobs = 20;

struct ChatMessage {
  std::string role;     // system, user or assistant
  std::string content;  // text parts joined by LF
};

struct GenerationRequest {
  Api api = Api::kChat;
  std::vector<ChatMessage> messages;  // kChat: not empty
  std::string prompt_text;            // kCompletions: this or prompt_tokens
  std::vector<Token> prompt_tokens;

  bool stream = false;
  bool include_usage = false;  // streaming: a last event with the usage
  uint32_t n = 1;
  std::optional<uint32_t> max_tokens;  // as asked for; see resolve_max_tokens
  std::optional<uint64_t> seed;
  std::vector<std::string> stop;
  SamplingParams sampling;
  bool return_token_ids = false;
  bool return_expert_counts = false;
  bool return_expert_gates = false;
  bool cache_prompt = true;
  int64_t priority = 0;  // lower is sooner, as in vLLM
};

struct RequestLimits {
  std::string_view served_model;
  uint32_t vocabulary = 0;  // token ids are below
};

// Errors: kInvalid; kNotFound if `model` names one that is not served.
Result<GenerationRequest> parse_generation_request(Api api, std::string_view body, const RequestLimits& limits);

// Body of /tokenize: {"prompt": text} or {"messages": […]}, optionally "model",
// "add_special_tokens" and "add_generation_prompt" (both true by default).
struct TokenizeRequest {
  std::optional<std::string> prompt;
  std::vector<ChatMessage> messages;
  bool add_special_tokens = true;
  bool add_generation_prompt = true;
};
Result<TokenizeRequest> parse_tokenize_request(std::string_view body, const RequestLimits& limits);

// Body of /detokenize: {"tokens": [ids]}.
Result<std::vector<Token>> parse_detokenize_request(std::string_view body, const RequestLimits& limits);

// Body of /v1/kv_transfer/release: {"lease": id}, or {"leases": [ids]} with up to kMostReleases.
inline constexpr size_t kMostReleases = 256;
Result<std::vector<std::string>> parse_release_request(std::string_view body);

struct TokenLimits {
  uint32_t context_tokens = 0;
  uint32_t kv_tokens = 0;  // of the whole engine; all choices of a request must fit at once
};

// The number of tokens to generate, now that the prompt's length is known: what was asked for; else the
// rest of the context (chat) or at most 16 (completions, OpenAI's default), as far as KV allows n of it.
// Errors: kTooLarge if the prompt leaves no room or less than was asked for; kInvalid if min_tokens
// exceeds the result.
Result<uint32_t> resolve_max_tokens(const GenerationRequest& request, size_t prompt_tokens, const TokenLimits& limits);

// The seed of one choice: the first one has the request's own, so that n = 1 equals choice 0 of any n.
uint64_t choice_seed(uint64_t request_seed, uint32_t choice);

}  // namespace kindred::engine
