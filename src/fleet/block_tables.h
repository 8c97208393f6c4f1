// The tables behind the prefix index: fixed in size, allocated once, never rehashed, so that no insert ever
// stalls. Memory comes zeroed from the system and becomes resident as it is used.
//
// Both are open addressing over buckets of one cache line with linear probing from bucket to bucket. A bucket
// counts the entries that wanted it, or passed it, and found it full; a search goes on only past buckets with
// such a count, so erasing needs no tombstones.
//
// Thread-safety: none.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>

#include "base/result.h"

namespace kindred::fleet {

// `count` zeroed objects of a trivial type, at a cache line's border.
template <class T>
class ZeroedArray {
 public:
  ZeroedArray() = default;
  explicit ZeroedArray(size_t count) : count_(count), memory_(std::calloc(count * sizeof(T) + kLine, 1)) {
    KINDRED_CHECK(memory_ != nullptr);
    void* at = memory_.get();
    size_t space = count * sizeof(T) + kLine;
    at_ = static_cast<T*>(std::align(kLine, count * sizeof(T), at, space));
  }

  T& operator[](size_t i) { return at_[i]; }
  const T& operator[](size_t i) const { return at_[i]; }
  size_t size() const { return count_; }
  size_t bytes() const { return count_ * sizeof(T) + kLine; }

 private:
  static constexpr size_t kLine = 64;
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  size_t count_ = 0;
  std::unique_ptr<void, Free> memory_;
  T* at_ = nullptr;
};

// Block hash -> node number. Tags are 8 bits; the caller compares the whole hash, which the node holds.
class BlockTable {
 public:
  struct alignas(64) Bucket {
    static constexpr uint32_t kSlots = 12;
    uint32_t node[kSlots];  // 0: free
    uint8_t tag[kSlots];
    uint32_t passed;
  };
  static constexpr double kLoad = 0.88;

  explicit BlockTable(size_t entries)
      : buckets_(static_cast<size_t>(static_cast<double>(entries) / (kLoad * Bucket::kSlots)) + 1) {}

  void prefetch(uint64_t hash) const { __builtin_prefetch(&buckets_[home(hash)]); }
  // The first node in the home bucket that may be it, or 0; for prefetching.
  uint32_t guess(uint64_t hash) const {
    const Bucket& bucket = buckets_[home(hash)];
    for (uint32_t s = 0; s < Bucket::kSlots; ++s) {
      if (bucket.tag[s] == tag_of(hash) && bucket.node[s] != 0) return bucket.node[s];
    }
    return 0;
  }
  // `is(node)`: whether the node has this hash. 0: none.
  template <class Is>
  uint32_t find(uint64_t hash, const Is& is) const {
    for (size_t at = home(hash), steps = 0; steps < buckets_.size(); at = next(at), ++steps) {
      const Bucket& bucket = buckets_[at];
      for (uint32_t s = 0; s < Bucket::kSlots; ++s) {
        if (bucket.tag[s] == tag_of(hash) && bucket.node[s] != 0 && is(bucket.node[s])) return bucket.node[s];
      }
      if (bucket.passed == 0) return 0;
    }
    return 0;
  }
  void insert(uint64_t hash, uint32_t node);  // not there yet; at most `entries`
  void erase(uint64_t hash, uint32_t node);   // there
  size_t bytes() const { return buckets_.bytes(); }

 private:
  // The upper 32 bits choose the bucket, the lowest 8 are the tag.
  size_t home(uint64_t hash) const { return ((hash >> 32) * buckets_.size()) >> 32; }
  size_t next(size_t at) const { return at + 1 == buckets_.size() ? 0 : at + 1; }
  static uint8_t tag_of(uint64_t hash) { return static_cast<uint8_t>(hash); }

  ZeroedArray<Bucket> buckets_;
};

// (worker slot, engine hash) -> node number: what each worker holds under the engine's own names. The engine's
// hash itself is not kept, only 25 bits of it mixed with the slot, beside the bucket's position: an unknown hash
// is taken for a known one in some 3 of 10^7 cases, and then one block is thought gone that is not.
//
// An entry carries a generation of its node, so that a node can be used anew before its old entries are erased.
class HoldingTable {
 public:
  static constexpr uint32_t kNodeBits = 27, kSlotBits = 10, kGenerationBits = 5, kDistanceBits = 5;
  static constexpr uint32_t kMaxNodes = 1U << kNodeBits, kMaxSlots = 1U << kSlotBits;
  static constexpr size_t kMaxDistance = 1U << kDistanceBits;

  struct Entry {
    uint64_t node : kNodeBits;  // 0: free
    uint64_t slot : kSlotBits;
    uint64_t generation : kGenerationBits;
    uint64_t distance : kDistanceBits;  // buckets from its home
    uint64_t tag : 17;                  // and 8 bits more beside it
  };
  struct alignas(64) Bucket {
    static constexpr uint32_t kSlots = 7;
    Entry entry[kSlots];
    uint8_t tag[kSlots];
    uint8_t passed;  // at most the 31 x 7 entries of the buckets before it
  };
  static constexpr double kLoad = 0.9;

  struct Place {
    size_t bucket = 0;
    uint32_t at = 0;
  };

  explicit HoldingTable(size_t entries)
      : buckets_(static_cast<size_t>(static_cast<double>(entries) / (kLoad * Bucket::kSlots)) + 1) {}

  // The place of an entry of this key for which `is(entry)`, if there is one.
  template <class Is>
  std::optional<Place> find(uint32_t slot, uint64_t engine_hash, const Is& is) const {
    const uint64_t key = mixed(slot, engine_hash);
    size_t at = home(key);
    for (size_t distance = 0; distance < kMaxDistance && distance < buckets_.size(); ++distance, at = next(at)) {
      const Bucket& bucket = buckets_[at];
      for (uint32_t s = 0; s < Bucket::kSlots; ++s) {
        const Entry& entry = bucket.entry[s];
        if (bucket.tag[s] == tag_8(key) && entry.tag == tag_17(key) && entry.node != 0 && entry.slot == slot &&
            entry.distance == distance && is(entry)) {
          return Place{at, s};
        }
      }
      if (bucket.passed == 0) break;
    }
    return std::nullopt;
  }
  // False: the buckets within reach are full.
  bool insert(uint32_t slot, uint64_t engine_hash, uint32_t node, uint32_t generation);
  void erase(Place place);

  const Entry& entry(Place place) const { return buckets_[place.bucket].entry[place.at]; }
  size_t next(size_t bucket) const { return bucket + 1 == buckets_.size() ? 0 : bucket + 1; }
  size_t buckets() const { return buckets_.size(); }
  size_t size() const { return size_; }
  size_t bytes() const { return buckets_.bytes(); }

 private:
  static uint64_t mixed(uint32_t slot, uint64_t engine_hash);
  // The upper 32 bits choose the bucket, the lowest 25 are the tag.
  size_t home(uint64_t mixed) const { return ((mixed >> 32) * buckets_.size()) >> 32; }
  static uint8_t tag_8(uint64_t mixed) { return static_cast<uint8_t>(mixed); }
  static uint64_t tag_17(uint64_t mixed) { return (mixed >> 8) & ((1U << 17) - 1); }

  ZeroedArray<Bucket> buckets_;
  size_t size_ = 0;
};

}  // namespace kindred::fleet
