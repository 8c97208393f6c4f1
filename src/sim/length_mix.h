// Requests of a trace, drawn anew so that their prompt lengths are spread as Gimbal's evaluation spreads them
// (arXiv 2026, §7.1 and Figure 8: five distributions of BurstGPT's lengths):
//   random      as they come in the trace, from some place on
//   central     most of the mass in the middle of the range
//   descending  mass falls with length
//   two-end     short and long ones, few between
//   average     the same mass at all lengths
//
// The paper draws the shapes and gives no formula. Ours: the range from 0 to the trace's 99th percentile is cut
// into kLengthBins equal parts; with x in (0, 1) the middle of a part, its weight is
//   central 1 + cos(2 pi (x - 1/2)), descending 1 - x, two-end 1 - cos(2 pi (x - 1/2)), average 1.
// A part is drawn by weight, then one of its requests, with the output length that it has in the trace. Parts without
// a request are left out.
//
// Thread-safety: pure functions. Deterministic by seed; cos is rounded to whole weights, so that the last bit of a
// C library does not matter.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "sim/trace.h"

namespace kindred::sim {

enum class LengthMix { kRandom, kCentral, kDescending, kTwoEnd, kAverage };

std::span<const std::string_view> length_mix_names();
std::string_view to_string(LengthMix mix);
// Error: kInvalid, naming what is accepted.
Result<LengthMix> parse_length_mix(std::string_view name);

inline constexpr uint32_t kLengthBins = 16;

struct ReshapeOptions {
  LengthMix mix = LengthMix::kRandom;
  uint32_t requests = 1000;
  // For models with less context than the trace's: prompts and outputs are scaled so that the longest prompt of the
  // range has so many tokens. 0: as they are.
  uint32_t longest_prompt_tokens = 0;
  uint64_t seed = 1;
};

// Lengths only: arrivals are 0, blocks and domains are left out. Error: kInvalid, naming the field.
Result<std::vector<TraceRequest>> reshape(std::span<const TraceRequest> trace, const ReshapeOptions& options);

}  // namespace kindred::sim
