// The values that cross the border between the engine's thread and everybody else.
//
// Thread-safety: plain values.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/result.h"
#include "expert/counts.h"
#include "expert/gates.h"

namespace kindred::engine {

using Token = int32_t;

struct SamplingParams {
  double temperature = 1.0;  // 0: greedy
  double top_p = 1.0;
  double presence_penalty = 0.0;    // OpenAI's definition, over generated tokens
  double frequency_penalty = 0.0;   // the same
  double repetition_penalty = 1.0;  // CTRL's, over prompt and generated tokens
  std::vector<std::pair<Token, double>> logit_bias;
  uint32_t min_tokens = 0;  // end-of-generation tokens cannot be drawn before
  bool ignore_eos = false;  // end-of-generation tokens are output like any other
  int32_t logprobs = -1;    // -1: none; otherwise how many alternatives to report
};

struct TokenLogprob {
  Token token = 0;
  float logprob = 0;
};

// One generated token. `text`: the bytes it made ready for the client (UTF-8 complete, past any
// possible stop string); may be empty, may hold bytes of earlier tokens.
struct Output {
  uint32_t choice = 0;
  Token token = 0;
  std::string text;
  std::string piece;  // the token's own bytes, for logprobs
  float logprob = 0;  // of `token`, before temperature, penalties and bias; only if asked for
  std::vector<TokenLogprob> top;
};

enum class FinishReason { kNone, kStop, kLength, kCancelled };

// What one choice has generated, complete enough to go on anywhere. This is the state that a handoff
// carries; `text_*` is what the client has or has not been given.
struct ChoiceState {
  uint64_t seed = 0;             // effective: derived from the request's seed and the choice's index
  std::vector<Token> generated;  // sampled ids, in order
  std::string held;              // bytes not given out: incomplete UTF-8 and a possible stop string
  FinishReason finish = FinishReason::kNone;
};

struct Usage {
  uint32_t prompt_tokens = 0;
  uint32_t cached_tokens = 0;      // of the prompt, from the prefix cache
  uint32_t completion_tokens = 0;  // over all choices
};

using Bytes = std::vector<uint8_t>;

// The prompt is in KV and each choice has its first token.
struct PrefillDone {
  Usage usage;
  std::vector<ChoiceState> choices;
  // Absent for models without experts.
  std::optional<expert::ExpertCounts> counts;  // all prompt tokens, from cached blocks or computed
  std::optional<expert::ExpertCounts> suffix;  // only the tokens after the cached prefix
  std::optional<expert::ExpertGates> gates;    // if asked for, and the gate gives probabilities
  // The sequence's KV, serialised; only for Job::Kind::kPrefill with a choice that goes on.
  std::shared_ptr<const Bytes> kv;
};

struct Finished {
  Usage usage;
  std::vector<FinishReason> reasons;                  // per choice
  std::optional<expert::ExpertCounts> decode_counts;  // generated tokens that were fed back; if asked for
};

// In this order: Output* (the first token of each choice) PrefillDone Output* Finished, or Error at any
// point and nothing after. kPrefill jobs end with PrefillDone. A choice that ends gives ChoiceEnd.
struct ChoiceEnd {
  uint32_t choice = 0;
  FinishReason reason = FinishReason::kStop;
  std::string text;  // the bytes that were held back, without the stop string
};
using Event = std::variant<Output, ChoiceEnd, PrefillDone, Finished, Error>;

struct Job {
  enum class Kind {
    kFull,     // prefill and decode here
    kPrefill,  // ends after the first token of each choice, with the KV
    kDecode,   // starts from `kv` and `choices`
  };
  Kind kind = Kind::kFull;
  std::string id;
  std::vector<Token> prompt;  // not empty; prompt + max_tokens <= context
  SamplingParams sampling;
  std::vector<std::string> stop;     // stop strings, not empty ones
  uint32_t max_tokens = 16;          // > 0, per choice
  std::vector<ChoiceState> choices;  // at least one. kDecode: as the prefill left them; else only seeds
  bool prefix_cache = true;          // false: neither looked up nor stored
  bool decode_counts = false;
  bool gates = false;    // of the prompt; those of cached tokens are unknown, so nothing is taken from the cache
  int64_t priority = 0;  // lower is sooner, under the queue policy `priority`
  std::optional<uint64_t> dispatch;  // the router's name for the leg, for traces
  std::shared_ptr<const Bytes> kv;   // kDecode only: untrusted
  // Called on the engine's thread; must not block and must not call the engine.
  std::function<void(Event)> on_event;
};

using JobId = uint64_t;

}  // namespace kindred::engine
