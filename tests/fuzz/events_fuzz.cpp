// KV events in MessagePack: no message harms the index, and its budget holds.
#include <span>

#include "fleet/kv_events.h"
#include "fuzz.h"

using namespace kindred;
using namespace kindred::fleet;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr PrefixIndexOptions kSmall{.budget_bytes = 64 * 1024, .workers = 4};
  constexpr PrefixIndex::WorkerId kWorker = 1;
  PrefixIndex index(kSmall);
  KvEventCounts counts;
  apply_kv_events(MsgpackDocument::parse(std::span(data, size)), kWorker, index, counts);
  apply_kv_events(MsgpackDocument::parse(std::span(data, size / 2)), kWorker, index, counts);
  KINDRED_CHECK(counts.messages == 2);
  KINDRED_CHECK(index.counts().blocks <= index.capacity());
  return 0;
}
