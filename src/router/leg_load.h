// What a request adds to its workers' ledgers: an estimate, made when the worker is chosen and taken back when
// the leg ends.
//
// Thread-safety: pure functions.
#pragma once

#include <algorithm>
#include <cstdint>

#include "fleet/fleet.h"
#include "router/request_scan.h"

namespace kindred::router {

// Bytes of JSON per token of prompt: about what English text and its framing come to. An estimate until somebody
// has counted.
inline constexpr uint64_t kBytesPerToken = 4;
// For a request that does not say how much it wants.
inline constexpr uint64_t kUsualOutputTokens = 256;
// What one request may count for, whatever numbers a client writes.
inline constexpr uint64_t kMostLegChoices = 1024;
inline constexpr uint64_t kMostLegTokens = 1ULL << 24;

inline int64_t choices_of(const RequestScan& scan) {
  return static_cast<int64_t>(std::clamp<uint64_t>(scan.n, 1, kMostLegChoices));
}

// To be read: `known` if it is not zero, else estimated from the prompt's bytes.
inline int64_t prompt_tokens_of(const RequestScan& scan, uint64_t known = 0) {
  return static_cast<int64_t>(std::min(known != 0 ? known : scan.prompt_bytes() / kBytesPerToken, kMostLegTokens));
}

inline int64_t output_tokens_of(const RequestScan& scan) {
  return choices_of(scan) *
         static_cast<int64_t>(std::min(scan.max_tokens.value_or(kUsualOutputTokens), kMostLegTokens));
}

inline fleet::LegLoad prefill_load(const RequestScan& scan) {
  return {.requests = 1, .tokens = prompt_tokens_of(scan)};
}
inline fleet::LegLoad whole_load(const RequestScan& scan, uint64_t prompt_tokens = 0) {
  return {.requests = choices_of(scan), .tokens = prompt_tokens_of(scan, prompt_tokens) + output_tokens_of(scan)};
}

}  // namespace kindred::router
