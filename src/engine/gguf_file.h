// Reads the head of a GGUF file (metadata and tensor table, no weights) and checks it against the
// file's size, since llama.cpp maps the file and a truncated one would end the process with SIGBUS.
//
// Thread-safety: pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/result.h"
#include "expert/counts.h"

namespace kindred::engine {

struct GgufSummary {
  std::string name;          // general.name, or the file's stem
  std::string architecture;  // general.architecture
  std::string quantisation;  // "Q8_0"
  uint32_t context_tokens = 0;
  uint32_t layers = 0;
  uint64_t file_bytes = 0;
  uint64_t tensors = 0;
  // All MoE layers but the model's last one; empty if the model has no experts.
  expert::ExpertShape experts;
  // 16 hex digits over the head, the file's size, samples of the weights, and kv_class().
  std::string fingerprint;
};

// What else must agree for KV to move between two processes: the layout that the pinned llama.cpp
// writes, and the types that the engine chooses (llama_session.cpp).
std::string kv_class();

// Errors: kNotFound, kIo, kCorrupt.
Result<GgufSummary> inspect_gguf(const std::string& path);

}  // namespace kindred::engine
