// Engine traces in MessagePack: what is accepted is within its bounds, and the same after a round trip.
#include <span>

#include "base/bytes.h"
#include "fleet/engine_trace.h"
#include "fuzz.h"

using namespace kindred;
using namespace kindred::fleet;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto trace = parse_trace(std::span(data, size));
  if (!trace) {
    KINDRED_CHECK(trace.error().code == ErrorCode::kCorrupt);
    return 0;
  }
  KINDRED_CHECK(trace->rank < kMostEngines && trace->received.size() <= kReceived);
  KINDRED_CHECK(trace->kv_usage >= 0 && trace->kv_usage <= 1 && trace->expert_pressure >= 0 && trace->time_s >= 0);
  KINDRED_CHECK(trace->remaining_prefill_tokens <= kMostTraceTokens);
  KINDRED_CHECK(trace->waiting_prefill_tokens <= kMostTraceTokens);
  const auto again = parse_trace(as_bytes(encode_trace(*trace)));
  KINDRED_CHECK(again.ok() && *again == *trace);
  return 0;
}
