// Shortest paths between the columns of an assignment, the inner step of assign.cpp and assign_weighted.cpp.
//
// The nodes are the K columns; weight[a * K + b] is the least that moving (a unit of) any row of a to b costs,
// infinite if there is none. The method is successive shortest paths with potentials: Dijkstra over the reduced
// costs weight + potential[a] - potential[b], which are never negative but for rounding (clamped, so the tree is
// a tree whatever the rounding does).
//
// Thread-safety: none; scratch of one assignment.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "base/result.h"

namespace kindred::expert {

class ResidualPaths {
 public:
  static constexpr double kInfinite = std::numeric_limits<double>::infinity();

  explicit ResidualPaths(size_t columns) : columns_(columns), potential_(columns, 0.0) {}

  // The cheapest way from `source` to a column that has room, as columns from that one back to the first after
  // `source`; parent() gives the column before each. `has_room(source)` must be false, and some column must have
  // room and be within reach.
  template <class HasRoom>
  const std::vector<uint32_t>& search(uint32_t source, std::span<const double> weight, const HasRoom& has_room) {
    distance_.assign(columns_, kInfinite);
    parent_.assign(columns_, kNoColumn);
    done_.assign(columns_, 0);
    distance_[source] = 0;
    uint32_t target = kNoColumn;
    while (target == kNoColumn) {
      const uint32_t nearest = nearest_open();
      KINDRED_CHECK(nearest != kNoColumn);
      done_[nearest] = 1;
      if (has_room(nearest)) target = nearest;
      else relax_from(nearest, weight);
    }
    for (uint32_t c = 0; c < columns_; ++c) potential_[c] += std::min(distance_[c], distance_[target]);
    path_.clear();
    for (uint32_t c = target; c != source; c = parent_[c]) path_.push_back(c);
    return path_;
  }

  uint32_t parent(uint32_t column) const { return parent_[column]; }

 private:
  static constexpr uint32_t kNoColumn = std::numeric_limits<uint32_t>::max();

  uint32_t nearest_open() const {
    uint32_t nearest = kNoColumn;
    for (uint32_t c = 0; c < columns_; ++c) {
      if (done_[c] == 0 && distance_[c] < kInfinite && (nearest == kNoColumn || distance_[c] < distance_[nearest])) {
        nearest = c;
      }
    }
    return nearest;
  }

  void relax_from(uint32_t from, std::span<const double> weights) {
    for (uint32_t to = 0; to < columns_; ++to) {
      const double weight = weights[from * columns_ + to];
      if (to == from || done_[to] != 0 || weight == kInfinite) continue;
      const double through = distance_[from] + std::max(0.0, weight + potential_[from] - potential_[to]);
      if (through < distance_[to]) {
        distance_[to] = through;
        parent_[to] = from;
      }
    }
  }

  size_t columns_;
  std::vector<double> potential_;
  std::vector<double> distance_;  // of the last search, as are the next three
  std::vector<uint32_t> parent_;
  std::vector<uint8_t> done_;
  std::vector<uint32_t> path_;
};

}  // namespace kindred::expert
