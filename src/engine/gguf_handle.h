// RAII and reading for llama.cpp's gguf_context; for the engine's own files only.
//
// Thread-safety: as llama.cpp's: none for one handle.
#pragma once

#include <gguf.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>

#include "base/result.h"

namespace kindred::engine {

struct FreeGguf {
  void operator()(gguf_context* context) const { gguf_free(context); }
};
using Gguf = std::unique_ptr<gguf_context, FreeGguf>;

struct CloseFile {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using File = std::unique_ptr<std::FILE, CloseFile>;

// Metadata and tensor table, without weights. Error: kCorrupt.
Result<Gguf> open_gguf(const std::string& path);

// The value of `key`, if it is there and of that kind (an unsigned number below 2^32).
std::optional<std::string> gguf_text(const gguf_context* gguf, const std::string& key);
std::optional<uint32_t> gguf_number(const gguf_context* gguf, const std::string& key);

}  // namespace kindred::engine
