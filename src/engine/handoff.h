// What passes between the two legs of a disaggregated request (docs/kindred-dialect.md §1 and §2).
//
// The prefill worker writes `state`; the router hands it on without looking inside; the decode worker
// parses it as untrusted input. It holds everything the decode leg needs, so that nothing is rendered
// or tokenised twice:
//   {"id","created","model","max_tokens","prompt":[ids],"usage":{…},
//    "choices":[{"seed":"<16 hex>","held":"<base64>","text":"<base64>","finish":""|"stop"|"length",
//                "tokens":[{"id","logprob","top":[[id,logprob],…]},…]},…],
//    "expert_counts":{…},"expert_gates":{…}}      these only if the client asked for them
// Seeds are hex since many JSON readers keep only 53 bits of a number; text is base64 since held-back
// bytes need not be UTF-8.
//
// Thread-safety: plain values and pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "engine/lease_store.h"
#include "engine/openai_render.h"
#include "engine/types.h"
#include "expert/counts.h"
#include "net/http_message.h"

namespace kindred::engine {

struct HandoffChoice {
  uint64_t seed = 0;
  std::string held;         // bytes not given out yet
  ChoiceProgress progress;  // its tokens are the ids generated so far
};

struct HandoffState {
  std::string id;  // of the response
  int64_t created = 0;
  std::string model;
  uint32_t max_tokens = 0;  // per choice
  std::vector<Token> prompt;
  Usage usage;
  std::vector<HandoffChoice> choices;
  std::optional<expert::ExpertCounts> counts, suffix;  // if the client asked
  std::optional<expert::ExpertGates> gates;            // the same
};

struct PrefillReply {
  bool finished = false;  // then neither lease nor state
  std::string content_type;
  std::string first;  // bytes for the client
  Usage usage;
  uint32_t n = 1;
  uint32_t max_tokens = 0;
  std::string fingerprint;
  std::optional<expert::ExpertCounts> counts, suffix;  // for the router; absent for models without experts
  std::optional<Lease> lease;
  std::optional<HandoffState> state;
};
inline constexpr std::string_view kPrefillReplyType = "application/vnd.kindred.prefill+json";
std::string write_prefill_reply(const PrefillReply& reply);

struct Handoff {
  net::Endpoint from;
  std::string fingerprint;
  Lease lease;
  HandoffState state;
};

struct HandoffLimits {
  uint32_t vocabulary = 0;
  uint32_t context_tokens = 0;
  uint64_t lease_bytes = 0;  // larger blobs are not pulled
};

// Error: kInvalid, naming the field.
Result<Handoff> parse_handoff(std::string_view json, const HandoffLimits& limits);

// The state that the engine continues a choice from.
ChoiceState choice_state(const HandoffChoice& choice);

}  // namespace kindred::engine
