#include "engine/lease_store.h"

#include <fmt/format.h>
#include <xxhash.h>

#include "base/bytes.h"

namespace kindred::engine {

std::string kv_hash(std::span<const uint8_t> bytes) {
  const XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
  return hex64(hash.high64) + hex64(hash.low64);
}

LeaseStore::LeaseStore(const Clock& clock, uint64_t most_bytes, std::chrono::milliseconds ttl)
    : clock_(clock), most_bytes_(most_bytes), ttl_(ttl) {}

Result<Lease> LeaseStore::put(std::shared_ptr<const Bytes> bytes) {
  const uint64_t size = bytes->size();
  if (size > most_bytes_) {
    return Error{ErrorCode::kTooLarge, fmt::format("KV of {} bytes; leases hold {} in all", size, most_bytes_)};
  }
  std::string hash = kv_hash(*bytes);  // outside the lock: it reads megabytes
  const std::lock_guard lock(mutex_);
  drop_expired();
  if (size > most_bytes_ - bytes_) {
    return Error{ErrorCode::kExhausted,
                 fmt::format("no room for KV of {} bytes: {} of {} are leased", size, bytes_, most_bytes_)};
  }
  Lease lease{next_id(), size, hash, ttl_};
  leases_.emplace(lease.id, Entry{{std::move(bytes), std::move(hash)}, clock_.now() + ttl_});
  bytes_ += size;
  return lease;
}

Result<LeaseStore::Pulled> LeaseStore::get(const std::string& id) {
  const std::lock_guard lock(mutex_);
  drop_expired();
  const auto found = leases_.find(id);
  if (found == leases_.end()) return Error{ErrorCode::kNotFound, "no such lease: unknown, released or expired"};
  return found->second.blob;
}

Result<std::chrono::milliseconds> LeaseStore::renew(const std::string& id) {
  const std::lock_guard lock(mutex_);
  drop_expired();
  const auto found = leases_.find(id);
  if (found == leases_.end()) return Error{ErrorCode::kNotFound, "no such lease: unknown, released or expired"};
  found->second.until = clock_.now() + ttl_;
  return ttl_;
}

void LeaseStore::release(const std::string& id) {
  std::shared_ptr<const Bytes> freed;  // outlives the lock: freeing megabytes takes a while
  const std::lock_guard lock(mutex_);
  const auto found = leases_.find(id);
  if (found == leases_.end()) return;
  freed = std::move(found->second.blob.bytes);
  bytes_ -= freed->size();
  leases_.erase(found);
}

size_t LeaseStore::expire() {
  const std::lock_guard lock(mutex_);
  return drop_expired();
}

size_t LeaseStore::count() const {
  const std::lock_guard lock(mutex_);
  return leases_.size();
}

uint64_t LeaseStore::bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

std::string LeaseStore::next_id() {
  const auto word = [this] { return uint64_t{entropy_()} << 32 | entropy_(); };
  const uint64_t first = word();
  return hex64(first) + hex64(word());
}

size_t LeaseStore::drop_expired() {
  const MonotonicTime now = clock_.now();
  return std::erase_if(leases_, [&](const auto& entry) {
    if (entry.second.until > now) return false;
    bytes_ -= entry.second.blob.bytes->size();
    return true;
  });
}

}  // namespace kindred::engine
