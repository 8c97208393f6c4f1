// KV that prefill workers of a fleet keep for decode workers.
//
// Thread-safety: confined to the fleet's thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "base/rng.h"
#include "live/worker_loop.h"

namespace kindred::live {

struct Lease {
  std::weak_ptr<WorkerLoop> owner;
  uint32_t worker = 0;  // its number
  uint64_t epoch = 0;   // of the owner
  Place place;
  uint32_t prompt_tokens = 0;
  MonotonicTime expires{};
};

// XXH3-128 as 32 hex digits. A lease's blob is its id: the KV itself does not exist.
std::string blob_hash(std::string_view blob);

class LeaseBook {
 public:
  // `clock` outlives this.
  LeaseBook(const Clock& clock, std::chrono::milliseconds ttl, uint64_t seed) : clock_(clock), ttl_(ttl), ids_(seed) {}

  std::string put(Lease lease);  // `expires` is set here; returns its id
  // Null: unknown, released, expired, or its worker was killed. Valid until the next call.
  const Lease* find(const std::string& id);
  bool renew(const std::string& id);
  void release(const std::string& id);  // also one that is gone
  void expire();                        // all that are due
  size_t count(uint32_t worker) const;
  std::chrono::milliseconds ttl() const { return ttl_; }

 private:
  using Map = std::map<std::string, Lease>;
  Map::iterator live(const std::string& id);
  Map::iterator drop(Map::iterator at);

  const Clock& clock_;
  const std::chrono::milliseconds ttl_;
  Rng ids_;
  Map leases_;
};

}  // namespace kindred::live
