// Randomness with one result per seed on any machine: no std:: distribution (their algorithms differ
// between standard libraries), integer arithmetic only.
#pragma once

#include <cstdint>

namespace kindred {

// The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): a bijection on 64 bits in which
// every input bit moves every output bit about half of the time.
constexpr uint64_t mix64(uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

// A number in [0, 1) that depends on (seed, position) alone, so that it does not matter which worker
// draws it or what was drawn before. 53 bits: every double in [0, 1) with that spacing is reachable.
constexpr double uniform_at(uint64_t seed, uint64_t position) {
  return static_cast<double>(mix64(mix64(seed) ^ mix64(position + 0x632be59bd9b4e019ULL)) >> 11) * 0x1.0p-53;
}

// A sequential generator: SplitMix64. Not thread-safe.
class Rng {
 public:
  explicit Rng(uint64_t seed) : state_(seed) {}

  uint64_t next() {
    const uint64_t x = mix64(state_);
    state_ += 0x9e3779b97f4a7c15ULL;
    return x;
  }

  double uniform() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }

  // In [0, bound), without bias. bound > 0.
  uint64_t below(uint64_t bound) {
    // Lemire's method: reject the low products that would make some results more likely.
    for (;;) {
      const unsigned __int128 product = static_cast<unsigned __int128>(next()) * bound;
      const auto low = static_cast<uint64_t>(product);
      if (low >= bound || low >= (0 - bound) % bound) return static_cast<uint64_t>(product >> 64);
    }
  }

 private:
  uint64_t state_;
};

}  // namespace kindred
