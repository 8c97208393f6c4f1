// Serialised KV of one sequence, as llama_state_seq_get_data writes it, checked before llama.cpp reads it.
//
// llama.cpp checks sizes and types itself, but not positions, and a NaN in the cache would spread. The
// layout below is that of llama.cpp 0.3.36 (state_write_meta and state_write_data), little-endian:
//   u32 magic, i32 source sequence, u32 streams (1), u32 cells,
//   per cell: i32 position, u32 sequences (1), i32 sequence
//   u32 values transposed, u32 layers
//   per layer: i32 key type, u64 row bytes, rows
//   per layer: i32 value type, u64 row bytes, rows        or, if transposed,
//              i32 value type, u32 element bytes, u32 elements, elements by row
// Models with sliding windows or several positions per token write more; for them `known` is false and
// only the magic is checked here.
//
// Thread-safety: plain values and pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/result.h"

namespace kindred::engine {

struct KvLayout {
  struct Rows {
    int32_t type = 0;         // ggml_type
    uint64_t cell_bytes = 0;  // per cell
    uint32_t element_bytes = 0;
    bool operator==(const Rows&) const = default;
  };
  bool known = false;
  uint32_t magic = 0;
  bool transposed = false;
  std::vector<Rows> keys, values;

  uint64_t cell_bytes() const;  // of all layers, with the cell's own entry
  bool operator==(const KvLayout&) const = default;
};

// From a blob that this process wrote, of a sequence of `tokens` tokens.
KvLayout learn_kv_layout(std::span<const uint8_t> blob, uint32_t tokens);

// Untrusted `blob` must be exactly a sequence of `tokens` tokens at positions 0..tokens-1 in `layout`,
// and all its numbers finite. Error: kCorrupt.
Status check_kv_blob(std::span<const uint8_t> blob, const KvLayout& layout, uint32_t tokens);

}  // namespace kindred::engine
