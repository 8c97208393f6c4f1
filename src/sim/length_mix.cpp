#include "sim/length_mix.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>

#include "base/rng.h"

namespace kindred::sim {
namespace {

// By value of LengthMix.
constexpr auto kMixNames = std::to_array<std::string_view>({"random", "central", "descending", "two-end", "average"});
constexpr double kRangeQuantile = 0.99;
constexpr double kWeightUnits = 1000;
constexpr uint32_t kMostReshaped = 10'000'000;

uint64_t weight_of(LengthMix mix, uint32_t bin) {
  const double x = (bin + 0.5) / kLengthBins;
  const double wave = std::cos(2 * std::numbers::pi * (x - 0.5));
  double weight = 1;
  switch (mix) {
    case LengthMix::kCentral: weight = 1 + wave; break;
    case LengthMix::kDescending: weight = 1 - x; break;
    case LengthMix::kTwoEnd: weight = 1 - wave; break;
    case LengthMix::kRandom:
    case LengthMix::kAverage: break;
  }
  return static_cast<uint64_t>(std::llround(weight * kWeightUnits));
}

// The length that 99 % of prompts do not exceed.
uint32_t range_of(std::span<const TraceRequest> trace) {
  std::vector<uint32_t> lengths;
  for (const TraceRequest& request : trace) lengths.push_back(request.prompt_tokens);
  const auto rank = static_cast<size_t>(std::ceil(kRangeQuantile * static_cast<double>(lengths.size())));
  const auto at = lengths.begin() + static_cast<std::ptrdiff_t>(std::max<size_t>(rank, 1) - 1);
  std::ranges::nth_element(lengths, at);
  return *at;
}

class MixDrawer {
 public:
  MixDrawer(std::span<const TraceRequest> trace, uint32_t range, LengthMix mix) : bins_(kLengthBins) {
    for (uint32_t i = 0; i < trace.size(); ++i) {
      const uint64_t length = trace[i].prompt_tokens;
      if (length == 0 || length > range) continue;
      bins_[(length - 1) * kLengthBins / range].push_back(i);
    }
    for (uint32_t bin = 0; bin < kLengthBins; ++bin) {
      total_ += bins_[bin].empty() ? 0 : weight_of(mix, bin);
      cumulative_[bin] = total_;
    }
  }
  bool empty() const { return total_ == 0; }

  // Index into the trace.
  uint32_t draw(Rng& rng) const {
    const auto at = std::ranges::upper_bound(cumulative_, rng.below(total_));
    const std::vector<uint32_t>& bin = bins_[static_cast<size_t>(at - cumulative_.begin())];
    return bin[rng.below(bin.size())];
  }

 private:
  std::vector<std::vector<uint32_t>> bins_;
  std::array<uint64_t, kLengthBins> cumulative_{};
  uint64_t total_ = 0;
};

}  // namespace

std::span<const std::string_view> length_mix_names() { return kMixNames; }

std::string_view to_string(LengthMix mix) { return kMixNames.at(static_cast<size_t>(mix)); }

Result<LengthMix> parse_length_mix(std::string_view name) {
  const auto found = std::ranges::find(kMixNames, name);
  if (found != kMixNames.end()) return static_cast<LengthMix>(found - kMixNames.begin());
  return invalid(fmt::format("length mix '{}'; accepted: {}", name, fmt::join(kMixNames, ", ")), "mix");
}

Result<std::vector<TraceRequest>> reshape(std::span<const TraceRequest> trace, const ReshapeOptions& options) {
  if (trace.empty()) return invalid("there is no request to draw lengths from", "trace");
  if (options.requests == 0 || options.requests > kMostReshaped) {
    return invalid(fmt::format("{} requests; accepted: 1 to {}", options.requests, kMostReshaped), "requests");
  }
  const uint32_t range = range_of(trace);
  const MixDrawer drawer(trace, range, options.mix);
  if (drawer.empty()) return invalid("no request of the trace has a prompt of the range", "trace");
  Rng rng(mix64(options.seed) ^ static_cast<uint64_t>(options.mix));
  const auto scaled = [&](uint32_t tokens) {
    if (options.longest_prompt_tokens == 0) return std::max(tokens, 1U);
    const uint64_t whole = uint64_t{tokens} * options.longest_prompt_tokens / range;
    return static_cast<uint32_t>(std::clamp<uint64_t>(whole, 1, options.longest_prompt_tokens));
  };
  std::vector<TraceRequest> out;
  uint64_t next = rng.below(trace.size());
  while (out.size() < options.requests) {
    const uint64_t at = options.mix == LengthMix::kRandom ? next++ % trace.size() : drawer.draw(rng);
    if (trace[at].prompt_tokens == 0 || trace[at].prompt_tokens > range) continue;
    out.push_back({.prompt_tokens = scaled(trace[at].prompt_tokens), .output_tokens = scaled(trace[at].output_tokens)});
  }
  return out;
}

}  // namespace kindred::sim
