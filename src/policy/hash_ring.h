// A consistent hash ring: each worker owns the arcs that end at its points, so that a worker that
// comes or goes moves only its own keys.
//
// Reference: casys-kaist/ELDR eldr/serving/prefix_hash.py (same hash, same points).
//
// Thread-safety: immutable after construction.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace kindred::policy {

// BLAKE2b with a digest of 8 bytes (no key), read big-endian.
uint64_t blake2b_64(std::string_view bytes);

class HashRing {
 public:
  struct Point {
    uint64_t hash;
    uint32_t worker;  // position in `urls`
    auto operator<=>(const Point&) const = default;
  };

  HashRing() = default;
  // Worker w's points are the hashes of "<url>#0", "<url>#1", ... in decimal.
  HashRing(std::span<const std::string_view> urls, uint32_t vnodes);

  // Position in points() of the first point at or behind `hash`, past the end the first. Not empty.
  size_t locate(uint64_t hash) const;
  std::span<const Point> points() const { return points_; }

 private:
  std::vector<Point> points_;  // ascending
};

}  // namespace kindred::policy
