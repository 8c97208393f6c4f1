#include "live/leases.h"

#include <xxhash.h>

#include <algorithm>

#include "base/bytes.h"

namespace kindred::live {

std::string blob_hash(std::string_view blob) {
  const XXH128_hash_t hash = XXH3_128bits(blob.data(), blob.size());
  return hex64(hash.high64) + hex64(hash.low64);
}

std::string LeaseBook::put(Lease lease) {
  std::string id = hex64(ids_.next()) + hex64(ids_.next());
  lease.expires = clock_.now() + ttl_;
  leases_.emplace(id, std::move(lease));
  return id;
}

LeaseBook::Map::iterator LeaseBook::drop(Map::iterator at) {
  const Lease lease = at->second;
  const auto next = leases_.erase(at);
  const auto owner = lease.owner.lock();
  if (owner && owner->epoch() == lease.epoch) owner->release(lease.place);
  return next;
}

LeaseBook::Map::iterator LeaseBook::live(const std::string& id) {
  const auto found = leases_.find(id);
  if (found == leases_.end()) return found;
  const auto owner = found->second.owner.lock();
  if (owner && owner->epoch() == found->second.epoch && clock_.now() < found->second.expires) return found;
  drop(found);
  return leases_.end();
}

const Lease* LeaseBook::find(const std::string& id) {
  const auto found = live(id);
  return found == leases_.end() ? nullptr : &found->second;
}

bool LeaseBook::renew(const std::string& id) {
  const auto found = live(id);
  if (found == leases_.end()) return false;
  found->second.expires = clock_.now() + ttl_;
  return true;
}

void LeaseBook::release(const std::string& id) {
  if (const auto found = live(id); found != leases_.end()) drop(found);
}

void LeaseBook::expire() {
  for (auto at = leases_.begin(); at != leases_.end();) {
    const auto owner = at->second.owner.lock();
    const bool gone = !owner || owner->epoch() != at->second.epoch || clock_.now() >= at->second.expires;
    at = gone ? drop(at) : std::next(at);
  }
}

size_t LeaseBook::count(uint32_t worker) const {
  return static_cast<size_t>(
      std::ranges::count_if(leases_, [&](const auto& entry) { return entry.second.worker == worker; }));
}

}  // namespace kindred::live
