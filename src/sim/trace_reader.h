// Traces that others publish, read as they are, and arrivals drawn from a process.
//
// Thread-safety: pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "sim/trace.h"

namespace kindred::sim {

// By its first line:
//   {...}                          Mooncake: timestamp (ms), input_length, output_length, hash_ids (of blocks of 512
//                                  tokens; optional here), a JSON object a line. Kindred's own lines are these with
//                                  expert_profile (a whole number) and domain (a name) besides, both optional.
//   ...ContextTokens...            Azure 2023 and 2024: TIMESTAMP, ContextTokens, GeneratedTokens
//   ...Request tokens...           BurstGPT: Timestamp (s), Request tokens, Response tokens
// Arrivals count from the first request. A request without a generated token (BurstGPT: one that failed) is left
// out and counted in Trace::skipped.
//
// `path` may end in .xz. Errors: kNotFound, kIo, kCorrupt, kTooLarge; kInvalid, naming line and field: missing,
// negative, beyond its bound, or earlier than the line before.
Result<Trace> read_trace(const std::string& path);
Result<Trace> parse_trace(std::string text, const std::string& origin);

// Mooncake lines with what Kindred adds, for any reader of them.
std::string trace_to_jsonl(const Trace& trace);

struct ArrivalOptions {
  uint64_t requests = 1000;
  double rate_per_s = 10;
  // Shape of the gamma distribution of the times between arrivals: 1 is Poisson, less is burstier, towards infinity
  // they come like clockwork. The squared coefficient of variation is 1 / burstiness.
  double burstiness = 1;
  // Drawn evenly from these, ends included.
  uint32_t least_prompt_tokens = 256, most_prompt_tokens = 256;
  uint32_t least_output_tokens = 512, most_output_tokens = 512;
  uint64_t seed = 1;
};
// Error: kInvalid, naming the field.
Result<Trace> draw_arrivals(const ArrivalOptions& options);

// The lengths, blocks and domains of `lengths`, requests drawn with replacement, at the arrivals of `options`, whose
// own lengths are not used. Error: also if there is no request to draw.
Result<Trace> draw_arrivals(const ArrivalOptions& options, const Trace& lengths);

}  // namespace kindred::sim
