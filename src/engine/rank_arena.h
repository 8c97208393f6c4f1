// Memory of one rank for one set of weights: an address range for all of it, pages only for what was written.
//
// Every rank reserves the whole range, so that an expert has the same offset at every rank and moves without
// any index being changed.
//
// Thread-safety: different ranges may be used from different threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/result.h"

namespace kindred::engine {

class RankArena {
 public:
  // `filled`: all of it will be written and nothing released, so that large pages waste no memory (with small ones
  // the products with experts take up to a fifth longer). Error: kExhausted (no address space).
  static Result<RankArena> reserve(uint64_t bytes, bool filled = false);
  RankArena(RankArena&& other) noexcept;
  RankArena& operator=(RankArena&& other) noexcept;
  RankArena(const RankArena&) = delete;
  RankArena& operator=(const RankArena&) = delete;
  ~RankArena();

  static uint64_t page_bytes();
  std::byte* at(uint64_t offset) { return data_ + offset; }
  std::span<std::byte> range(uint64_t offset, uint64_t bytes) { return {data_ + offset, bytes}; }
  // Gives back the pages that lie wholly inside; they read as zero afterwards.
  void release(uint64_t offset, uint64_t bytes);
  uint64_t resident_bytes() const;  // for tests and reports; asks the kernel

 private:
  RankArena(std::byte* data, uint64_t bytes) : data_(data), bytes_(bytes) {}
  std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
};

}  // namespace kindred::engine
