// The simple placements, Gimbal's greedy, and how all of them fill redundant slots.

#include <algorithm>
#include <numeric>

#include "place/routing.h"
#include "place/solvers.h"

namespace kindred::place {
namespace {

Placement empty_placement(const Problem& problem) {
  return {.layers = problem.traffic.layers, .experts = problem.traffic.experts, .ranks = problem.ranks()};
}

// How many experts each rank gets before the copies: as even as can be, the first ranks one more.
std::vector<uint32_t> even_shares(const Problem& problem) {
  std::vector<uint32_t> share(problem.ranks(), problem.traffic.experts / problem.ranks());
  for (uint32_t r = 0; r < problem.traffic.experts % problem.ranks(); ++r) ++share[r];
  return share;
}

// Copies of one layer, one by one; keeps what each rank has to do.
class CopyFiller {
 public:
  CopyFiller(const Problem& problem, size_t layer, std::span<const uint32_t> rank)
      : problem_(problem),
        load_(problem.traffic.load(layer)),
        holders_(load_.size()),
        held_(problem.ranks(), 0),
        work_(problem.ranks(), 0.0) {
    for (uint32_t e = 0; e < load_.size(); ++e) add(e, rank[e]);
  }

  Copy next(size_t layer) {
    uint32_t hottest = 0;
    while (!has_place(hottest)) ++hottest;
    for (uint32_t e = hottest + 1; e < load_.size(); ++e) {
      if (per_copy(e) > per_copy(hottest) && has_place(e)) hottest = e;
    }
    uint32_t target = problem_.ranks();
    for (uint32_t r = 0; r < problem_.ranks(); ++r) {
      if (can_take(r, hottest) && (target == problem_.ranks() || work_[r] < work_[target])) target = r;
    }
    add(hottest, target);
    return {.layer = static_cast<uint32_t>(layer), .expert = hottest, .rank = target};
  }

 private:
  double per_copy(uint32_t e) const { return load_[e] / static_cast<double>(holders_[e].size()); }
  bool can_take(uint32_t r, uint32_t e) const {
    return held_[r] < problem_.slots() && std::find(holders_[e].begin(), holders_[e].end(), r) == holders_[e].end();
  }
  bool has_place(uint32_t e) const {
    for (uint32_t r = 0; r < problem_.ranks(); ++r) {
      if (can_take(r, e)) return true;
    }
    return false;
  }
  void add(uint32_t e, uint32_t r) {
    for (const uint32_t holder : holders_[e]) work_[holder] -= per_copy(e);
    holders_[e].push_back(r);
    for (const uint32_t holder : holders_[e]) work_[holder] += per_copy(e);
    ++held_[r];
  }

  const Problem& problem_;
  std::vector<double> load_;
  std::vector<std::vector<uint32_t>> holders_;
  std::vector<uint32_t> held_;
  std::vector<double> work_;
};

// Gimbal, section 5.3 and design, "Placement": what an expert of load `load` pays on a rank.
struct Score {
  double cost = 0;
  bool moves = false;
  uint32_t filled = 0;

  bool operator<(const Score& other) const {
    if (cost != other.cost) return cost < other.cost;
    if (moves != other.moves) return other.moves;
    return filled < other.filled;
  }
};

void place_layer_greedily(const Problem& problem, size_t layer, std::vector<uint32_t>& out) {
  const LayerRouting routing(problem, layer);
  const std::vector<double> load = problem.traffic.load(layer);
  const std::vector<uint32_t> share = even_shares(problem);
  std::vector<uint32_t> order(load.size());
  std::iota(order.begin(), order.end(), 0U);
  std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return load[a] > load[b]; });
  std::vector<double> work(problem.ranks(), 0.0), cost(problem.ranks());
  std::vector<uint32_t> filled(problem.ranks(), 0);
  std::vector<uint32_t> rank(load.size());
  for (const uint32_t e : order) {
    routing.single_costs(e, cost);
    Score best;
    uint32_t chosen = problem.ranks();
    for (uint32_t r = 0; r < problem.ranks(); ++r) {
      if (filled[r] == share[r]) continue;
      const double above = std::max(0.0, work[r] + load[e] - routing.mean_load());
      const Score score{.cost = cost[r] + problem.weights.beta * above,
                        .moves = !problem.old.empty() && problem.old.layer(layer)[e] != r,
                        .filled = filled[r]};
      if (chosen == problem.ranks() || score < best) {
        best = score;
        chosen = r;
      }
    }
    rank[e] = chosen;
    work[chosen] += load[e];
    ++filled[chosen];
  }
  out.insert(out.end(), rank.begin(), rank.end());
}

}  // namespace

void copy_by_load(const Problem& problem, size_t layer, std::span<const uint32_t> rank, std::vector<Copy>& copies) {
  if (problem.redundant == 0) return;
  CopyFiller filler(problem, layer, rank);
  const size_t before = copies.size();
  for (uint32_t i = 0; i < problem.redundant; ++i) copies.push_back(filler.next(layer));
  std::sort(copies.begin() + static_cast<std::ptrdiff_t>(before), copies.end());
}

Placement place_linear(const Problem& problem) {
  Placement placement = empty_placement(problem);
  const uint32_t slots = problem.slots();
  for (uint32_t l = 0; l < placement.layers; ++l) {
    for (uint32_t e = 0; e < placement.experts; ++e) placement.rank.push_back(e / slots);
    for (uint32_t i = 0; i < problem.redundant; ++i) {
      placement.copies.push_back(
          {.layer = l, .expert = i % placement.experts, .rank = (placement.experts + i) / slots});
    }
  }
  std::sort(placement.copies.begin(), placement.copies.end());
  return placement;
}

Placement place_round_robin(const Problem& problem) {
  Placement placement = empty_placement(problem);
  for (uint32_t l = 0; l < placement.layers; ++l) {
    for (uint32_t e = 0; e < placement.experts; ++e) placement.rank.push_back(e % placement.ranks);
    copy_by_load(problem, l, placement.layer(l), placement.copies);
  }
  return placement;
}

Placement place_greedy(const Problem& problem) {
  Placement placement = empty_placement(problem);
  for (uint32_t l = 0; l < placement.layers; ++l) {
    place_layer_greedily(problem, l, placement.rank);
    copy_by_load(problem, l, placement.layer(l), placement.copies);
  }
  return placement;
}

}  // namespace kindred::place
