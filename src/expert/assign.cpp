#include "expert/assign.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "expert/residual.h"

namespace kindred::expert {
namespace {

// The residual graph over columns and the rows that realise its edges.
class Drain {
 public:
  Drain(std::span<const double> cost, std::span<const uint32_t> capacity)
      : cost_(cost),
        capacity_(capacity),
        columns_(capacity.size()),
        rows_(cost.size() / columns_),
        column_(rows_),
        size_(columns_, 0),
        heaps_(columns_ * columns_),
        weight_(columns_ * columns_, ResidualPaths::kInfinite),
        paths_(columns_) {}

  std::vector<uint32_t> run() {
    start_at_cheapest();
    if (!over_capacity()) return std::move(column_);
    build_heaps();
    for (uint32_t source = 0; source < columns_; ++source) {
      while (size_[source] > capacity_[source]) push_one_from(source);
    }
    return std::move(column_);
  }

 private:
  // A row that would leave for `delta` more. Stale when the row is in another column by now: then it
  // is dropped once it surfaces (a row that returned finds its entry valid again, with the same delta).
  struct Candidate {
    double delta;
    uint32_t row;
    bool operator>(const Candidate& other) const {
      return delta != other.delta ? delta > other.delta : row > other.row;
    }
  };
  using Heap = std::vector<Candidate>;  // std::*_heap with greater: the cheapest on top

  double cost_at(size_t row, size_t column) const { return cost_[row * columns_ + column]; }
  Candidate candidate(uint32_t row, uint32_t from, uint32_t to) const {
    return {cost_at(row, to) - cost_at(row, from), row};
  }

  void start_at_cheapest() {
    for (size_t row = 0; row < rows_; ++row) {
      const auto costs = cost_.subspan(row * columns_, columns_);
      column_[row] = static_cast<uint32_t>(std::min_element(costs.begin(), costs.end()) - costs.begin());
      ++size_[column_[row]];
    }
  }

  bool over_capacity() const {
    for (size_t c = 0; c < columns_; ++c) {
      if (size_[c] > capacity_[c]) return true;
    }
    return false;
  }

  void build_heaps() {
    for (uint32_t from = 0; from < columns_; ++from) {
      for (uint32_t to = 0; to < columns_; ++to) {
        if (from != to) heaps_[from * columns_ + to].reserve(size_[from]);
      }
    }
    for (uint32_t row = 0; row < rows_; ++row) {
      const uint32_t from = column_[row];
      for (uint32_t to = 0; to < columns_; ++to) {
        if (from != to) heaps_[from * columns_ + to].push_back(candidate(row, from, to));
      }
    }
    for (Heap& heap : heaps_) std::make_heap(heap.begin(), heap.end(), std::greater<>{});
    for (uint32_t from = 0; from < columns_; ++from) refresh_edges(from);
  }

  void refresh_edges(uint32_t from) {
    for (uint32_t to = 0; to < columns_; ++to) {
      if (from == to) continue;
      Heap& heap = heaps_[from * columns_ + to];
      while (!heap.empty() && column_[heap.front().row] != from) {
        std::pop_heap(heap.begin(), heap.end(), std::greater<>{});
        heap.pop_back();
      }
      weight_[from * columns_ + to] = heap.empty() ? ResidualPaths::kInfinite : heap.front().delta;
    }
  }

  void move_row(uint32_t from, uint32_t to) {
    const uint32_t row = heaps_[from * columns_ + to].front().row;
    column_[row] = to;
    for (uint32_t next = 0; next < columns_; ++next) {
      if (next == to) continue;
      Heap& heap = heaps_[to * columns_ + next];
      heap.push_back(candidate(row, to, next));
      std::push_heap(heap.begin(), heap.end(), std::greater<>{});
    }
    refresh_edges(from);
    refresh_edges(to);
  }

  // A column with room can always be reached: a full column has rows, and each row an edge to every
  // column; the capacities suffice.
  void push_one_from(uint32_t source) {
    const auto& path = paths_.search(source, weight_, [&](uint32_t c) { return size_[c] < capacity_[c]; });
    const uint32_t target = path.front();
    // From the target's end, so that the row that leaves a column is one that was there before: the
    // row that enters it is not yet among its candidates.
    for (const uint32_t to : path) move_row(paths_.parent(to), to);
    --size_[source];
    ++size_[target];
  }

  std::span<const double> cost_;
  std::span<const uint32_t> capacity_;
  size_t columns_, rows_;
  std::vector<uint32_t> column_;  // [rows]
  std::vector<size_t> size_;      // [columns]
  std::vector<Heap> heaps_;       // [columns, columns]: by (from, to)
  std::vector<double> weight_;    // the heaps' tops
  ResidualPaths paths_;
};

}  // namespace

Result<Assignment> assign_rows(std::span<const double> cost, std::span<const uint32_t> capacity) {
  if (capacity.empty() || cost.size() % capacity.size() != 0) {
    return invalid(fmt::format("assignment: {} costs do not form rows of {} columns", cost.size(), capacity.size()));
  }
  const size_t rows = cost.size() / capacity.size();
  if (rows > std::numeric_limits<uint32_t>::max()) return invalid("assignment: too many rows");
  const uint64_t room = std::accumulate(capacity.begin(), capacity.end(), uint64_t{0});
  if (room < rows) {
    return invalid(fmt::format("assignment: {} rows, but the capacities sum to {}", rows, room));
  }
  if (!std::all_of(cost.begin(), cost.end(), [](double c) { return std::isfinite(c); })) {
    return invalid("assignment: a cost is not finite");
  }
  Assignment result;
  result.column = Drain(cost, capacity).run();
  for (size_t row = 0; row < rows; ++row) result.total += cost[row * capacity.size() + result.column[row]];
  return result;
}

Result<std::vector<uint32_t>> best_permutation(std::span<const double> similarity, size_t k) {
  if (k == 0 || similarity.size() != k * k) {
    return invalid(fmt::format("permutation: {} similarities are not {} x {}", similarity.size(), k, k));
  }
  std::vector<double> cost(similarity.begin(), similarity.end());
  for (double& value : cost) value = -value;
  Result<Assignment> assignment = assign_rows(cost, std::vector<uint32_t>(k, 1));
  if (!assignment) return std::move(assignment).error();
  return std::move(assignment->column);
}

}  // namespace kindred::expert
