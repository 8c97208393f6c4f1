// Which workers hold a block, in 32 bits: none, one worker's slot, or the number of a set. Sets are shared by all
// blocks with the same holders (a prefix of a thousand blocks on the same three workers is one set).
//
// Thread-safety: none.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

namespace kindred::fleet {

class HolderSets {
 public:
  using Holders = uint32_t;
  static constexpr Holders kNone = 0;

  // `slots`: a multiple of 64. At most `most` sets live at a time.
  HolderSets(uint32_t slots, size_t most) : words_(slots / 64), most_(most) {}

  // The holders with one more or one less. Give what was stored and store what is returned: references are
  // counted. No value: there are `most` sets already, and nothing has changed.
  std::optional<Holders> with(Holders holders, uint32_t slot);
  std::optional<Holders> without(Holders holders, uint32_t slot);
  Holders none(Holders holders);  // releases them; kNone

  bool contains(Holders holders, uint32_t slot) const;
  // ANDs the holders into `alive`, a bit per slot.
  void intersect(Holders holders, std::span<uint64_t> alive) const;

  size_t words() const { return words_; }
  size_t bytes() const;
  // Of one set at most, with its share of the tables (two 8-byte words of hash and link, vectors doubled).
  static constexpr size_t bytes_per_set(uint32_t slots) { return 2 * (slots / 64 * 8 + 8) + 48; }

 private:
  static constexpr Holders kSet = 1U << 31;
  std::span<const uint64_t> bits(Holders set) const { return {&bits_[(set ^ kSet) * words_], words_}; }
  std::optional<Holders> intern(const std::vector<uint64_t>& bits);
  void release(Holders holders);

  size_t words_, most_;
  std::vector<uint64_t> bits_;        // by set
  std::vector<uint32_t> references_;  // by set
  std::vector<uint32_t> free_;
  std::unordered_map<uint64_t, uint32_t> by_bits_;  // hash of the bits -> set
  std::vector<uint64_t> scratch_;
};

}  // namespace kindred::fleet
