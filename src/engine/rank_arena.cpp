#include "engine/rank_arena.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

namespace kindred::engine {

Result<RankArena> RankArena::reserve(uint64_t bytes, bool filled) {
  void* data = mmap(nullptr, std::max<uint64_t>(bytes, 1), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) {
    return Error{ErrorCode::kExhausted,
                 fmt::format("no address range of {} bytes for a rank's experts: {}", bytes, std::strerror(errno))};
  }
  if (filled) (void)madvise(data, std::max<uint64_t>(bytes, 1), MADV_HUGEPAGE);  // a system without it does without
  return RankArena(static_cast<std::byte*>(data), bytes);
}

RankArena::RankArena(RankArena&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

RankArena& RankArena::operator=(RankArena&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

RankArena::~RankArena() {
  if (data_ != nullptr) munmap(data_, std::max<uint64_t>(bytes_, 1));
}

uint64_t RankArena::page_bytes() {
  const int64_t bytes = sysconf(_SC_PAGESIZE);
  return bytes > 0 ? static_cast<uint64_t>(bytes) : 4096;
}

void RankArena::release(uint64_t offset, uint64_t bytes) {
  const uint64_t page = page_bytes();
  const uint64_t begin = (offset + page - 1) / page * page;
  const uint64_t end = (offset + bytes) / page * page;
  // It cannot fail on a range of our own; if it did, the old copy would only stay in memory.
  if (begin < end) (void)madvise(data_ + begin, end - begin, MADV_DONTNEED);
}

uint64_t RankArena::resident_bytes() const {
  const uint64_t page = page_bytes();
  std::vector<unsigned char> pages((bytes_ + page - 1) / page);
  if (pages.empty() || mincore(data_, bytes_, pages.data()) != 0) return 0;
  return static_cast<uint64_t>(std::ranges::count_if(pages, [](unsigned char p) { return (p & 1U) != 0; })) * page;
}

}  // namespace kindred::engine
