// Responses of /v1/chat/completions and /v1/completions, as SSE events or as one body, written by
// appending to strings: one event is a few hundred bytes, and a tree for each would cost more than
// sampling the token.
//
// A renderer can be taken over by another worker in the middle of a response: progress() is what it
// has gathered, resume() goes on from there.
//
// Thread-safety: none; one renderer per request.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/openai_request.h"
#include "engine/types.h"
#include "expert/counts.h"

namespace kindred::engine {

// JSON has no infinities; -9999 is what OpenAI's API shows for "practically impossible".
inline constexpr float kLeastLogprob = -9999;
std::string logprob_text(float logprob);

struct ResponseMeta {
  std::string id;
  int64_t created = 0;  // Unix seconds
  std::string model;
  std::string fingerprint;
};

struct TokenRecord {
  Token token = 0;
  float logprob = 0;
  std::vector<TokenLogprob> top;
};

// What a response has gathered of one choice.
struct ChoiceProgress {
  std::string text;                 // not streaming only: the text so far
  std::vector<TokenRecord> tokens;  // every token so far
  FinishReason finish = FinishReason::kNone;
};

// The end of a response.
struct ResponseTail {
  Usage usage;
  std::optional<expert::ExpertCounts> counts, suffix, decode_counts;  // only if the client asked
  std::optional<expert::ExpertGates> gates;                           // the same
};

// A token's text for logprobs, control tokens included.
using PieceOf = std::function<std::string(Token)>;

class ResponseRenderer {
 public:
  // `prompt`: its ids, for return_token_ids; copied only then.
  ResponseRenderer(const GenerationRequest& request, ResponseMeta meta, PieceOf piece_of,
                   std::span<const Token> prompt);

  std::string_view content_type() const;

  // Each appends to `out` what the client can have now; without streaming only finish() does.
  void output(const Output& output, std::string& out);
  void choice_end(uint32_t choice, FinishReason reason, std::string_view text, std::string& out);
  void finish(const ResponseTail& tail, std::string& out);

  // Continues where another renderer of the same request stopped, which has sent what opens a stream.
  void resume(std::vector<ChoiceProgress> progress);
  const std::vector<ChoiceProgress>& progress() const { return choices_; }
  bool all_finished() const;
  uint32_t completion_tokens() const;  // over all choices
  const ResponseMeta& meta() const { return meta_; }

 private:
  void open_event(std::string& out) const;
  void close_event(std::string& out) const;
  void begin(std::string& out);
  void delta(uint32_t choice, std::string_view text, const TokenRecord* token, FinishReason finish, std::string& out);
  void body_choice(uint32_t index, std::string& out) const;
  void append_logprobs(std::span<const TokenRecord> tokens, size_t text_offset, std::string& out) const;
  void append_chat_logprobs(std::span<const TokenRecord> tokens, std::string& out) const;
  void append_tail(const ResponseTail& tail, std::string& out) const;
  bool wants_logprobs() const { return logprobs_ >= 0; }

  Api api_;
  bool stream_, include_usage_, token_ids_, counts_, gates_;
  int32_t logprobs_;
  ResponseMeta meta_;
  PieceOf piece_of_;
  std::vector<Token> prompt_;
  std::vector<ChoiceProgress> choices_;
  std::vector<size_t> text_offsets_;  // completions' logprobs: where each choice's next token begins
  std::vector<bool> prompt_sent_;     // per choice, for return_token_ids
  bool begun_ = false;
};

// {"prompt_tokens":…,"completion_tokens":…,"total_tokens":…,"prompt_tokens_details":{"cached_tokens":…}}
std::string usage_json(const Usage& usage);

// An SSE event with an error, for a stream that has begun.
std::string error_event(std::string_view error_json);

}  // namespace kindred::engine
