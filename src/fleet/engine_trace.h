// An engine's latest state, as it pushes it and as routers read it (docs/kindred-dialect.md, "Traces").
//
// A message of a worker's ZMQ PUB socket has three parts: kTraceTopic, the message's number on that socket
// (8 bytes, big-endian), and the trace in MessagePack.
//
// Thread-safety: plain values and pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace kindred::fleet {

inline constexpr std::string_view kTraceTopic = "kindred.trace";
// A router's name for one leg that it sends: 16 hex digits.
inline constexpr std::string_view kDispatchHeader = "X-Kindred-Dispatch";
// The same for vLLM, whose engines see no headers: a member of the body's `vllm_xargs`.
inline constexpr std::string_view kDispatchArg = "kindred_dispatch";

inline constexpr uint32_t kMostEngines = 64;  // of a worker
inline constexpr size_t kReceived = 256;      // dispatches that a trace remembers

struct EngineTrace {
  uint32_t rank = 0;      // the engine within its worker, below kMostEngines
  uint64_t epoch = 0;     // drawn when the worker starts; another one: it was restarted
  uint64_t sequence = 0;  // of this engine, rises by one with each trace
  double time_s = 0;      // the sender's wall clock; nobody may order by it, clocks differ
  // Tokens, at most kMostTraceTokens.
  uint64_t remaining_prefill_tokens = 0;  // of running requests, what is left to compute
  uint64_t waiting_prefill_tokens = 0;    // of waiting ones, net of prefix hits
  uint32_t running = 0, waiting = 0;      // requests
  double kv_usage = 0;                    // 0..1
  uint64_t kv_tokens = 0;                 // that its KV has room for; 0, or left out: not said
  double expert_pressure = 0;             // token equivalents; 0 where expert ranks are off
  std::vector<uint64_t> received;         // dispatch ids of the last requests taken in, newest last

  bool operator==(const EngineTrace&) const = default;
};

// Sums over a worker's engines stay exact in a double.
inline constexpr uint64_t kMostTraceTokens = 1ULL << 46;

std::string encode_trace(const EngineTrace& trace);

// Untrusted. Error: kCorrupt, naming the field and what is accepted. Fields that it does not know are ignored.
Result<EngineTrace> parse_trace(std::span<const uint8_t> bytes);

}  // namespace kindred::fleet
