// Makes a smaller GGUF from a larger one.
//
// Thread-safety: pure function; writes `to`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/result.h"

namespace kindred::engine {

// Accepted by quantize_gguf.
std::vector<std::string> quantisation_names();

struct QuantizeOptions {
  std::string type = "q8_0";
  std::string name;      // general.name of the result, at most 127 bytes; empty: unchanged
  uint32_t threads = 0;  // 0: all cores
};

// Reads `from`, writes `to` (an unfinished file is not left behind).
// Errors: those of inspect_gguf; kInvalid (type, name), kIo, kInternal.
Status quantize_gguf(const std::string& from, const std::string& to, const QuantizeOptions& options);

}  // namespace kindred::engine
