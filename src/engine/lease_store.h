// Host memory for serialised KV between prefill and decode, bounded in bytes and in time.
//
// A lease is pulled by its id, which nobody can guess, as often as needed until it is released or its
// time is up. Blobs are shared: one that is being sent stays valid when its lease ends, but counts against
// the bound only while leased.
//
// Thread-safety: all methods may be called from any thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <random>
#include <span>
#include <string>
#include <unordered_map>

#include "base/clock.h"
#include "base/result.h"
#include "engine/types.h"

namespace kindred::engine {

// XXH3-128 as 32 hex digits (its canonical, big-endian form).
std::string kv_hash(std::span<const uint8_t> bytes);

struct Lease {
  std::string id;  // 32 hex digits
  uint64_t bytes = 0;
  std::string hash;  // kv_hash
  std::chrono::milliseconds ttl{0};
};

class LeaseStore {
 public:
  struct Pulled {
    std::shared_ptr<const Bytes> bytes;
    std::string hash;
  };

  // `clock` must outlive the store.
  LeaseStore(const Clock& clock, uint64_t most_bytes, std::chrono::milliseconds ttl);

  // kExhausted: the bytes would pass the bound even without expired leases. kTooLarge: they never fit.
  Result<Lease> put(std::shared_ptr<const Bytes> bytes);
  // kNotFound: unknown, released or expired.
  Result<Pulled> get(const std::string& id);
  Result<std::chrono::milliseconds> renew(const std::string& id);
  void release(const std::string& id);  // unknown ids are ignored

  // Drops expired leases; the other methods do so too, this is for a timer. Returns how many.
  size_t expire();

  size_t count() const;
  uint64_t bytes() const;

 private:
  struct Entry {
    Pulled blob;
    MonotonicTime until;
  };
  std::string next_id();
  size_t drop_expired();  // holds the lock

  const Clock& clock_;
  const uint64_t most_bytes_;
  const std::chrono::milliseconds ttl_;
  mutable std::mutex mutex_;
  std::random_device entropy_;  // the system's: ids are capabilities
  uint64_t bytes_ = 0;
  std::unordered_map<std::string, Entry> leases_;
};

}  // namespace kindred::engine
