// Expected distinct experts of a batch under expert parallelism: of the rank that has the most to read, layer by
// layer, since the others wait for it.
//
// With q[l,e] how likely each expert is unused (expert/inclusion.h), rank r is expected to read
// U[l,r] = sum over its experts (1 - q[l,e]), and a layer waits for max_r U[l,r]. That is the maximum of expectations:
// the expected maximum, which no sum gives, lies a little above it.
//
// Thread-safety: RankMap is immutable after make(); pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/result.h"

namespace kindred::expert {

// Which rank has each expert.
class RankMap {
 public:
  static constexpr uint32_t kMostRanks = 256;

  // `rank` [L, E]. Error: kInvalid: no cells or not whole layers, no ranks or more than kMostRanks, a rank beyond.
  static Result<RankMap> make(uint32_t layers, uint32_t experts, uint32_t ranks, std::span<const uint32_t> rank);
  // Expert e on rank e * ranks / E of every layer.
  static Result<RankMap> linear(uint32_t layers, uint32_t experts, uint32_t ranks);

  uint32_t ranks() const { return ranks_; }
  uint32_t layers() const { return layers_; }
  uint32_t experts() const { return experts_; }
  std::span<const uint8_t> of_layer(size_t layer) const { return std::span(rank_).subspan(layer * experts_, experts_); }
  bool operator==(const RankMap&) const = default;

 private:
  uint32_t layers_ = 0, experts_ = 0, ranks_ = 0;
  std::vector<uint8_t> rank_;  // [L, E]
};

// Sum over layers of the busiest rank's expected distinct experts. `unused` [L, E] of the map's shape.
double busiest_rank_used(const RankMap& map, std::span<const float> unused);

// The same once a request of inclusion p has joined: an expert is then unused with probability q (1 - p). `unused`
// empty: nobody is there.
double busiest_rank_used(const RankMap& map, std::span<const float> unused, std::span<const float> inclusion);

}  // namespace kindred::expert
