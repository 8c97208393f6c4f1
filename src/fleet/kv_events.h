// KV cache events of an engine, as vLLM and SGLang publish them: one MessagePack batch per message,
//   array form (vLLM up to 0.21, SGLang): [ts, [event, ...], dp_rank?], an event being
//       ["BlockStored", [hash, ...], parent|nil, [token, ...], block_size, lora_id, medium, lora_name, extra_keys,
//        group_idx], ["BlockRemoved", [hash, ...], medium, group_idx] or ["AllBlocksCleared"], short of trailing
//       fields at their defaults;
//   map form (vLLM from 0.27): the same by name, {"ts", "events": [{"type": "BlockStored", "block_hashes", ...}]}.
// Either form may come in the other; hashes are integers or bytes.
//
// Untrusted: what is malformed is counted and left out, event by event, and nothing else is harmed.
//
// Thread-safety: as the index.
#pragma once

#include <cstdint>

#include "base/msgpack.h"
#include "fleet/prefix_index.h"

namespace kindred::fleet {

struct KvEventCounts {
  uint64_t messages = 0;
  uint64_t events = 0;     // applied
  uint64_t malformed = 0;  // messages and events
  uint64_t ignored = 0;    // blocks outside of the accelerator's memory, of other groups than the first
};

// Applies one message's payload, as far as it could be read, to the index. Returns the tokens per block of the last
// block stored, or 0.
uint32_t apply_kv_events(const Result<MsgpackDocument>& payload, PrefixIndex::WorkerId worker, PrefixIndex& index,
                         KvEventCounts& counts);

}  // namespace kindred::fleet
