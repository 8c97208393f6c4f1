#include "expert/rank_union.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

namespace kindred::expert {
namespace {

// used(i): how likely cell i is used.
template <class Used>
double busiest(const RankMap& map, const Used& used) {
  std::array<double, RankMap::kMostRanks> sums;
  double out = 0;
  size_t cell = 0;
  for (uint32_t l = 0; l < map.layers(); ++l) {
    std::fill_n(sums.begin(), map.ranks(), 0.0);
    for (const uint8_t rank : map.of_layer(l)) sums[rank] += used(cell++);
    out += *std::max_element(sums.begin(), sums.begin() + map.ranks());
  }
  return out;
}

size_t cells_of(const RankMap& map) { return size_t{map.layers()} * map.experts(); }

}  // namespace

Result<RankMap> RankMap::make(uint32_t layers, uint32_t experts, uint32_t ranks, std::span<const uint32_t> rank) {
  if (layers == 0 || experts == 0 || rank.size() != size_t{layers} * experts) {
    return invalid(fmt::format("placement: {} cells; accepted: {} layers x {} experts", rank.size(), layers, experts),
                   "placement");
  }
  if (ranks == 0 || ranks > kMostRanks) {
    return invalid(fmt::format("ranks: got {}; accepted: 1 to {}", ranks, kMostRanks), "ranks");
  }
  RankMap out;
  out.layers_ = layers;
  out.experts_ = experts;
  out.ranks_ = ranks;
  out.rank_.reserve(rank.size());
  for (const uint32_t one : rank) {
    if (one >= ranks) return invalid(fmt::format("placement: rank {} of {}", one, ranks), "placement");
    out.rank_.push_back(static_cast<uint8_t>(one));
  }
  return out;
}

Result<RankMap> RankMap::linear(uint32_t layers, uint32_t experts, uint32_t ranks) {
  std::vector<uint32_t> rank;
  for (uint32_t l = 0; l < layers; ++l) {
    for (uint64_t e = 0; e < experts; ++e) rank.push_back(static_cast<uint32_t>(e * ranks / experts));
  }
  return make(layers, experts, ranks, rank);
}

double busiest_rank_used(const RankMap& map, std::span<const float> unused) {
  KINDRED_CHECK(unused.size() == cells_of(map));
  return busiest(map, [unused](size_t i) { return 1 - static_cast<double>(unused[i]); });
}

double busiest_rank_used(const RankMap& map, std::span<const float> unused, std::span<const float> inclusion) {
  KINDRED_CHECK(inclusion.size() == cells_of(map));
  if (unused.empty()) return busiest(map, [inclusion](size_t i) { return static_cast<double>(inclusion[i]); });
  KINDRED_CHECK(unused.size() == cells_of(map));
  return busiest(map,
                 [unused, inclusion](size_t i) { return 1 - static_cast<double>(unused[i] * (1 - inclusion[i])); });
}

}  // namespace kindred::expert
