#include "router/token_cache.h"

#include <xxhash.h>

namespace kindred::router {
namespace {

constexpr size_t kEntryBytes = 160;  // list and map nodes, the vector's head, their allocations

}  // namespace

TokenCache::Key TokenCache::key(std::string_view bytes) {
  const XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
  return {hash.low64, hash.high64};
}

size_t TokenCache::bytes_of(const Entry& entry) { return kEntryBytes + entry.tokens->size() * sizeof(uint32_t); }

TokenIds TokenCache::find(const Key& key) {
  const std::lock_guard lock(mutex_);
  const auto found = by_key_.find(key);
  if (found == by_key_.end()) return nullptr;
  entries_.splice(entries_.begin(), entries_, found->second);
  return found->second->tokens;
}

void TokenCache::add(const Key& key, TokenIds tokens) {
  const std::lock_guard lock(mutex_);
  if (by_key_.contains(key)) return;
  const Entry entry = {key, std::move(tokens)};
  const size_t more = bytes_of(entry);
  if (more > limit_bytes_) return;
  while (bytes_ + more > limit_bytes_) {
    bytes_ -= bytes_of(entries_.back());
    by_key_.erase(entries_.back().key);
    entries_.pop_back();
  }
  entries_.push_front(entry);
  by_key_.emplace(key, entries_.begin());
  bytes_ += more;
}

size_t TokenCache::bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

}  // namespace kindred::router
