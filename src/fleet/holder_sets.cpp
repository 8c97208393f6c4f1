#include "fleet/holder_sets.h"

#include <algorithm>
#include <bit>

#include "base/result.h"
#include "base/rng.h"

namespace kindred::fleet {
namespace {

uint64_t hash_of(std::span<const uint64_t> bits) {
  uint64_t hash = 0;
  for (const uint64_t word : bits) hash = mix64(hash ^ word);
  return hash;
}

}  // namespace

bool HolderSets::contains(Holders holders, uint32_t slot) const {
  if ((holders & kSet) == 0) return holders == slot + 1;
  return ((bits(holders)[slot / 64] >> (slot % 64)) & 1) != 0;
}

void HolderSets::intersect(Holders holders, std::span<uint64_t> alive) const {
  if ((holders & kSet) != 0) {
    const std::span<const uint64_t> set = bits(holders);
    for (size_t w = 0; w < words_; ++w) alive[w] &= set[w];
    return;
  }
  for (size_t w = 0; w < words_; ++w) {
    const bool here = holders != kNone && (holders - 1) / 64 == w;
    alive[w] &= here ? 1ULL << ((holders - 1) % 64) : 0;
  }
}

std::optional<HolderSets::Holders> HolderSets::intern(const std::vector<uint64_t>& bits) {
  const uint64_t hash = hash_of(bits);
  const auto found = by_bits_.find(hash);
  if (found != by_bits_.end()) {
    // Two sets with one hash of 64 bits: as good as full.
    if (!std::ranges::equal(this->bits(found->second | kSet), bits)) return std::nullopt;
    ++references_[found->second];
    return found->second | kSet;
  }
  if (by_bits_.size() >= most_) return std::nullopt;
  uint32_t set = 0;
  if (free_.empty()) {
    set = static_cast<uint32_t>(references_.size());
    references_.push_back(0);
    bits_.insert(bits_.end(), bits.begin(), bits.end());
  } else {
    set = free_.back();
    free_.pop_back();
    std::ranges::copy(bits, bits_.begin() + static_cast<ptrdiff_t>(set * words_));
  }
  references_[set] = 1;
  by_bits_.emplace(hash, set);
  return set | kSet;
}

void HolderSets::release(Holders holders) {
  if ((holders & kSet) == 0) return;
  const uint32_t set = holders ^ kSet;
  KINDRED_CHECK(references_[set] > 0);
  if (--references_[set] > 0) return;
  by_bits_.erase(hash_of(bits(holders)));
  free_.push_back(set);
}

std::optional<HolderSets::Holders> HolderSets::with(Holders holders, uint32_t slot) {
  if (holders == kNone) return slot + 1;
  if (contains(holders, slot)) return holders;
  scratch_.assign(words_, 0);
  if ((holders & kSet) != 0) std::ranges::copy(bits(holders), scratch_.begin());
  else scratch_[(holders - 1) / 64] |= 1ULL << ((holders - 1) % 64);
  scratch_[slot / 64] |= 1ULL << (slot % 64);
  const std::optional<Holders> out = intern(scratch_);
  if (out) release(holders);
  return out;
}

std::optional<HolderSets::Holders> HolderSets::without(Holders holders, uint32_t slot) {
  if (!contains(holders, slot)) return holders;
  if ((holders & kSet) == 0) return kNone;
  scratch_.assign(bits(holders).begin(), bits(holders).end());
  scratch_[slot / 64] &= ~(1ULL << (slot % 64));
  int left = 0;
  Holders single = kNone;
  for (size_t w = 0; w < words_; ++w) {
    left += std::popcount(scratch_[w]);
    if (scratch_[w] != 0)
      single = static_cast<Holders>(w * 64 + static_cast<size_t>(std::countr_zero(scratch_[w])) + 1);
  }
  const std::optional<Holders> out = left == 1 ? std::optional(single) : intern(scratch_);
  if (out) release(holders);
  return out;
}

HolderSets::Holders HolderSets::none(Holders holders) {
  release(holders);
  return kNone;
}

size_t HolderSets::bytes() const {
  return bits_.capacity() * 8 + references_.capacity() * 4 + free_.capacity() * 4 + by_bits_.size() * 32 +
         by_bits_.bucket_count() * 8 + scratch_.capacity() * 8;
}

}  // namespace kindred::fleet
