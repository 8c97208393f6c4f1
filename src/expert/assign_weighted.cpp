#include "expert/assign_weighted.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

#include "expert/residual.h"

namespace kindred::expert {
namespace {

constexpr int kMostRepairs = 16;  // per column: a search for a swap looks at all pairs of rows

// The optimum with rows that may be split. Weight is counted in integers, so that nothing is ever nearly empty.
class WeightedDrain {
 public:
  WeightedDrain(std::span<const double> cost, std::span<const uint32_t> weights, size_t columns, uint64_t cap)
      : cost_(cost),
        weights_(weights),
        columns_(columns),
        cap_(cap),
        share_(cost.size(), 0),
        load_(columns, 0),
        heaps_(columns * columns),
        edge_(columns * columns, ResidualPaths::kInfinite),
        paths_(columns) {}

  // [n, k]: how much of each row's weight went where.
  std::vector<uint32_t> run() {
    for (size_t row = 0; row < weights_.size(); ++row) {
      const auto costs = cost_.subspan(row * columns_, columns_);
      const auto cheapest = static_cast<size_t>(std::min_element(costs.begin(), costs.end()) - costs.begin());
      share_[row * columns_ + cheapest] = weights_[row];
      load_[cheapest] += weights_[row];
    }
    for (uint32_t row = 0; row < weights_.size(); ++row) {
      for (uint32_t c = 0; c < columns_; ++c) {
        if (share_[row * columns_ + c] > 0) offer(row, c);
      }
    }
    for (uint32_t from = 0; from < columns_; ++from) refresh(from);
    for (uint32_t source = 0; source < columns_; ++source) {
      while (load_[source] > cap_) push_from(source);
    }
    return std::move(share_);
  }

 private:
  struct Offer {
    double delta;  // per unit of weight
    uint32_t row;
    bool operator>(const Offer& other) const { return delta != other.delta ? delta > other.delta : row > other.row; }
  };

  // The row may leave `from` now.
  void offer(uint32_t row, uint32_t from) {
    for (uint32_t to = 0; to < columns_; ++to) {
      if (to == from) continue;
      std::vector<Offer>& heap = heaps_[from * columns_ + to];
      const double more = cost_[row * columns_ + to] - cost_[row * columns_ + from];
      heap.push_back({more / static_cast<double>(weights_[row]), row});
      std::push_heap(heap.begin(), heap.end(), std::greater<>{});
    }
  }

  void refresh(uint32_t from) {
    for (uint32_t to = 0; to < columns_; ++to) {
      if (from == to) continue;
      std::vector<Offer>& heap = heaps_[from * columns_ + to];
      while (!heap.empty() && share_[heap.front().row * columns_ + from] == 0) {
        std::pop_heap(heap.begin(), heap.end(), std::greater<>{});
        heap.pop_back();
      }
      edge_[from * columns_ + to] = heap.empty() ? ResidualPaths::kInfinite : heap.front().delta;
    }
  }

  uint32_t row_of(uint32_t from, uint32_t to) const { return heaps_[from * columns_ + to].front().row; }

  // As much as the rows on the path, the excess at its start and the room at its end allow.
  void push_from(uint32_t source) {
    const auto& path = paths_.search(source, edge_, [&](uint32_t c) { return load_[c] < cap_; });
    const uint32_t target = path.front();
    uint64_t amount = std::min(load_[source] - cap_, cap_ - load_[target]);
    for (const uint32_t to : path) {
      const uint32_t from = paths_.parent(to);
      amount = std::min<uint64_t>(amount, share_[row_of(from, to) * columns_ + from]);
    }
    for (const uint32_t to : path) {
      const uint32_t from = paths_.parent(to);
      const uint32_t row = row_of(from, to);
      uint32_t& there = share_[row * columns_ + to];
      share_[row * columns_ + from] -= static_cast<uint32_t>(amount);
      if (there == 0) offer(row, to);
      there += static_cast<uint32_t>(amount);
      refresh(from);
      refresh(to);
    }
    load_[source] -= amount;
    load_[target] += amount;
  }

  std::span<const double> cost_;
  std::span<const uint32_t> weights_;
  size_t columns_;
  uint64_t cap_;
  std::vector<uint32_t> share_;            // [n, k]
  std::vector<uint64_t> load_;             // [k]
  std::vector<std::vector<Offer>> heaps_;  // [k, k]: by (from, to), the cheapest on top; stale ones are dropped there
  std::vector<double> edge_;               // the heaps' tops
  ResidualPaths paths_;
};

// Whole rows and what columns weigh; makes rows whole and columns light enough.
class Rounding {
 public:
  Rounding(std::span<const double> cost, std::span<const uint32_t> weights, size_t columns, uint64_t cap)
      : cost_(cost),
        weights_(weights),
        columns_(columns),
        cap_(cap),
        column_(weights.size(), kUnplaced),
        load_(columns, 0) {}

  // Returns how many rows were split.
  uint32_t place(std::span<const uint32_t> share) {
    std::vector<uint32_t> split;
    for (uint32_t row = 0; row < weights_.size(); ++row) {
      const auto parts = share.subspan(row * columns_, columns_);
      const auto most = static_cast<uint32_t>(std::max_element(parts.begin(), parts.end()) - parts.begin());
      if (parts[most] == weights_[row]) put(row, most);
      else split.push_back(row);
    }
    std::stable_sort(split.begin(), split.end(), [&](uint32_t a, uint32_t b) { return weights_[a] > weights_[b]; });
    for (const uint32_t row : split) put(row, best_part(row, share.subspan(row * columns_, columns_)));
    return static_cast<uint32_t>(split.size());
  }

  // Each step takes weight off what is over the cap; the limit holds without it.
  void repair() {
    for (uint32_t c = 0; c < columns_; ++c) {
      for (int step = 0; step < kMostRepairs && load_[c] > cap_; ++step) {
        if (!move_out_of(c) && !swap_out_of(c)) break;
      }
    }
  }

  std::vector<uint32_t> take() { return std::move(column_); }

 private:
  static constexpr uint32_t kUnplaced = std::numeric_limits<uint32_t>::max();

  double cost_at(uint32_t row, uint32_t column) const { return cost_[row * columns_ + column]; }

  void put(uint32_t row, uint32_t column) {
    if (column_[row] != kUnplaced) load_[column_[row]] -= weights_[row];
    column_[row] = column;
    load_[column] += weights_[row];
  }

  uint32_t best_part(uint32_t row, std::span<const uint32_t> parts) const {
    uint32_t best = kUnplaced;
    for (uint32_t c = 0; c < columns_; ++c) {
      if (parts[c] == 0 || load_[c] + weights_[row] > cap_) continue;
      if (best == kUnplaced || cost_at(row, c) < cost_at(row, best)) best = c;
    }
    if (best != kUnplaced) return best;
    return static_cast<uint32_t>(std::min_element(load_.begin(), load_.end()) - load_.begin());
  }

  double price(double more, uint32_t column, uint64_t weight) const {
    return more / static_cast<double>(std::min(weight, load_[column] - cap_));
  }

  bool move_out_of(uint32_t from) {
    double best = ResidualPaths::kInfinite;
    uint32_t best_row = 0, best_to = 0;
    for (uint32_t row = 0; row < column_.size(); ++row) {
      if (column_[row] != from) continue;
      for (uint32_t to = 0; to < columns_; ++to) {
        if (to == from || load_[to] + weights_[row] > cap_) continue;
        const double at = price(cost_at(row, to) - cost_at(row, from), from, weights_[row]);
        if (at < best) best = at, best_row = row, best_to = to;
      }
    }
    if (best == ResidualPaths::kInfinite) return false;
    put(best_row, best_to);
    return true;
  }

  bool swap_out_of(uint32_t from) {
    double best = ResidualPaths::kInfinite;
    uint32_t best_out = 0, best_in = 0;
    for (uint32_t out = 0; out < column_.size(); ++out) {
      if (column_[out] != from) continue;
      for (uint32_t in = 0; in < column_.size(); ++in) {
        const uint32_t to = column_[in];
        if (to == from || weights_[in] >= weights_[out]) continue;
        const uint64_t less = weights_[out] - weights_[in];
        if (load_[to] + less > cap_) continue;
        const double more = cost_at(out, to) - cost_at(out, from) + cost_at(in, from) - cost_at(in, to);
        const double at = price(more, from, less);
        if (at < best) best = at, best_out = out, best_in = in;
      }
    }
    if (best == ResidualPaths::kInfinite) return false;
    const uint32_t to = column_[best_in];
    put(best_out, to);
    put(best_in, from);
    return true;
  }

  std::span<const double> cost_;
  std::span<const uint32_t> weights_;
  size_t columns_;
  uint64_t cap_;
  std::vector<uint32_t> column_;  // [n]
  std::vector<uint64_t> load_;    // [k]
};

}  // namespace

Result<WeightedAssignment> assign_weighted(std::span<const double> cost, std::span<const uint32_t> weights,
                                           size_t columns, uint64_t cap) {
  if (columns == 0 || weights.empty() || cost.size() != weights.size() * columns) {
    return invalid(fmt::format("weighted assignment: {} costs are not {} rows of {} columns", cost.size(),
                               weights.size(), columns));
  }
  if (weights.size() >= std::numeric_limits<uint32_t>::max()) return invalid("weighted assignment: too many rows");
  if (!std::all_of(cost.begin(), cost.end(), [](double c) { return std::isfinite(c); })) {
    return invalid("weighted assignment: a cost is not finite");
  }
  const uint32_t heaviest = *std::max_element(weights.begin(), weights.end());
  if (*std::min_element(weights.begin(), weights.end()) == 0) {
    return invalid("weighted assignment: a weight is 0; accepted: 1 or more", "weights");
  }
  const uint64_t sum = std::accumulate(weights.begin(), weights.end(), uint64_t{0});
  if (cap < (sum + columns - 1) / columns) {
    return invalid(fmt::format("weighted assignment: {} columns of {} cannot hold {}", columns, cap, sum), "cap");
  }
  const std::vector<uint32_t> share = WeightedDrain(cost, weights, columns, cap).run();
  WeightedAssignment result;
  for (size_t cell = 0; cell < share.size(); ++cell) {
    if (share[cell] == 0) continue;
    result.lower_bound += cost[cell] * static_cast<double>(share[cell]) / static_cast<double>(weights[cell / columns]);
  }
  Rounding rounding(cost, weights, columns, cap);
  result.split = rounding.place(share);
  rounding.repair();
  result.column = rounding.take();
  result.limit = std::max<uint64_t>(cap, sum / columns + heaviest);
  for (size_t row = 0; row < weights.size(); ++row) result.total += cost[row * columns + result.column[row]];
  return result;
}

}  // namespace kindred::expert
