// Where the simulator's experts come from: for each request, what its prompt used and a tape of what its
// generated tokens will use (sim/tape.h).
//
// Thread-safety: none; a process keeps a cache of what it has made. Results depend on the options, the trace request
// and its number alone, not on the order of calls.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/result.h"
#include "expert/activations.h"
#include "expert/counts.h"
#include "sim/tape.h"
#include "sim/trace.h"

namespace kindred::sim {

class ExpertProcess {
 public:
  virtual ~ExpertProcess() = default;

  virtual const expert::ExpertShape& shape() const = 0;
  // RequestExperts::domain is a place in it.
  virtual const std::vector<std::string>& domains() const = 0;
  // Rows that TraceRequest::expert_profile may name, if they are recorded requests; 0 if not.
  virtual uint32_t recorded() const { return 0; }
  // The `number`-th request of a run. request.domain is an index into domains(), taken modulo their number; -1: the
  // process draws one.
  virtual RequestExperts experts(const TraceRequest& request, uint64_t number) = 0;
};

// A token takes top_k experts without replacement, each time with probability proportional to exp(utility) among
// those left. The utility of an expert of a layer is a sum of independent, roughly normal terms of these standard
// deviations (natural logarithm):
//   base     one for all requests: experts that everybody uses, and that nobody does
//   domain   one a domain: its preferences, over which domains overlap as chance has it
//   request  one a prototype: how a request deviates from its domain
//   drift    one for every kDriftTokens tokens of a prototype: what a request is about for a while
//   phase    one a domain, and only in decode: what a prompt does not foretell
// All zero: every expert is as likely as the other, independently from token to token.
inline constexpr uint32_t kDriftTokens = 64;
struct SyntheticOptions {
  expert::ExpertShape shape;
  std::vector<std::string> domains = {"code", "math", "medical", "legal"};
  std::vector<double> domain_share = {};  // of requests without a domain; empty: equal
  double base = 0, domain = 0, request = 0, drift = 0, phase = 0;
  // Requests share prototypes, so that memory and time do not grow with requests: a request is a prototype of its
  // domain and a place on its tape. Prototypes are made when first asked for.
  uint32_t prototypes = 16;    // a domain
  uint32_t tape_tokens = 256;  // of a prototype, for decode; prompts have a tape of as many
  uint64_t seed = 1;
};

// With the deviations that `kindred simulate calibrate` found for 128 experts, top 8 (sim/calibrate.h), whatever the
// shape.
SyntheticOptions calibrated_synthetic(expert::ExpertShape shape);

// Error: kInvalid, naming the field.
Result<std::unique_ptr<ExpertProcess>> make_synthetic(SyntheticOptions options);

// Synthetic with every expert as likely as the other: E|U| = E (1 - (1 - k / E)^n).
Result<std::unique_ptr<ExpertProcess>> make_uniform(expert::ExpertShape shape, uint64_t seed);

// Recorded requests (a file of `kindred record`). A trace request takes row `expert_profile` (modulo their number),
// or else a row of its domain, or any. Counts have no order, so a tape's tokens are drawn: each takes top_k different
// experts, and each expert is used as often as was recorded. Error: kInvalid: no decode counts at all.
Result<std::unique_ptr<ExpertProcess>> make_recorded(const expert::Activations& activations, uint64_t seed);

// Recorded decisions, token by token: experts.u8 or experts.u8.xz, [tokens, layers, top_k] bytes, and index.jsonl, a
// line a request with token_offset, decode_tokens and domain. The prompt was not recorded: a request's first
// min(prompt_tokens, half) tokens stand for it, the others are its tape. Rows as above.
// Error: kNotFound, kIo, kCorrupt, kInvalid (names file, line and field).
struct TokenFileShape {
  uint32_t layers = 24, experts = 32, top_k = 4;  // gpt-oss-20b
  uint32_t prompt_tokens = 128;
};
Result<std::unique_ptr<ExpertProcess>> load_token_decisions(const std::string& folder, const TokenFileShape& shape,
                                                            uint64_t seed);

}  // namespace kindred::sim
