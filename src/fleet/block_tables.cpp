#include "fleet/block_tables.h"

#include "base/rng.h"

namespace kindred::fleet {

static_assert(sizeof(BlockTable::Bucket) == 64 && sizeof(HoldingTable::Bucket) == 64);

void BlockTable::insert(uint64_t hash, uint32_t node) {
  size_t at = home(hash);
  for (size_t steps = 0; steps < buckets_.size(); at = next(at), ++steps) {
    Bucket& bucket = buckets_[at];
    for (uint32_t s = 0; s < Bucket::kSlots; ++s) {
      if (bucket.node[s] != 0) continue;
      bucket.node[s] = node;
      bucket.tag[s] = tag_of(hash);
      return;
    }
    ++bucket.passed;
  }
  KINDRED_CHECK(!"the block table is full");
}

void BlockTable::erase(uint64_t hash, uint32_t node) {
  size_t at = home(hash);
  for (size_t steps = 0; steps < buckets_.size(); at = next(at), ++steps) {
    Bucket& bucket = buckets_[at];
    for (uint32_t s = 0; s < Bucket::kSlots; ++s) {
      if (bucket.node[s] != node) continue;
      bucket.node[s] = 0;
      return;
    }
    KINDRED_CHECK(bucket.passed > 0);
    --bucket.passed;
  }
  KINDRED_CHECK(!"the block is not in the table");
}

uint64_t HoldingTable::mixed(uint32_t slot, uint64_t engine_hash) { return mix64(engine_hash ^ mix64(slot)); }

bool HoldingTable::insert(uint32_t slot, uint64_t engine_hash, uint32_t node, uint32_t generation) {
  const uint64_t key = mixed(slot, engine_hash);
  const size_t from = home(key);
  size_t at = from;
  for (size_t distance = 0; distance < kMaxDistance && distance < buckets_.size(); ++distance, at = next(at)) {
    Bucket& bucket = buckets_[at];
    for (uint32_t s = 0; s < Bucket::kSlots; ++s) {
      if (bucket.entry[s].node != 0) continue;
      bucket.entry[s] = {
          .node = node, .slot = slot, .generation = generation, .distance = distance, .tag = tag_17(key)};
      bucket.tag[s] = tag_8(key);
      for (size_t passed = from; passed != at; passed = next(passed)) ++buckets_[passed].passed;
      ++size_;
      return true;
    }
  }
  return false;
}

void HoldingTable::erase(Place place) {
  Entry& entry = buckets_[place.bucket].entry[place.at];
  KINDRED_CHECK(entry.node != 0);
  size_t at = place.bucket;
  for (size_t distance = entry.distance; distance > 0; --distance) {
    at = at == 0 ? buckets_.size() - 1 : at - 1;
    KINDRED_CHECK(buckets_[at].passed > 0);
    --buckets_[at].passed;
  }
  entry = {};
  --size_;
}

}  // namespace kindred::fleet
