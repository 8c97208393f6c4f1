#include "place/copies.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace kindred::place {
namespace {

// ------------------------------------------------------------------------------------ which experts

// Part of an expert's traffic, [S].
struct Part {
  uint32_t expert = 0;
  std::vector<double> tokens;
};

double tokens_of(const Part& part) {
  double sum = 0;
  for (const double tokens : part.tokens) sum += tokens;
  return sum;
}

// Splits experts' traffic among copies.
class Splitter {
 public:
  explicit Splitter(const LayerRouting& routing) : routing_(routing), topology_(routing.problem().topology) {
    const size_t experts = routing.problem().traffic.experts;
    distance_.assign(experts, {});
    next_.resize(experts);
    chosen_.resize(experts);
    for (uint32_t e = 0; e < experts; ++e) {
      distance_[e].assign(topology_.sources, std::numeric_limits<double>::infinity());
      choose_first(e);
    }
  }

  // The expert whose next copy saves most; where none saves anything, the one with most load per copy.
  void add_copy() {
    uint32_t best = 0;
    bool found = false;
    for (uint32_t e = 0; e < next_.size(); ++e) {
      if (chosen_[e].size() >= topology_.ranks) continue;
      if (!found || better(e, best)) best = e;
      found = true;
    }
    KINDRED_CHECK(found);  // slots <= experts
    take(best, next_[best].saved > 0 ? next_[best].rank : kAnywhere);
  }

  std::vector<Part> parts() const {
    std::vector<Part> parts;
    for (uint32_t e = 0; e < chosen_.size(); ++e) append_parts(e, parts);
    return parts;
  }

 private:
  static constexpr uint32_t kAnywhere = std::numeric_limits<uint32_t>::max();
  struct Next {
    double saved = 0;
    uint32_t rank = 0;
  };

  bool better(uint32_t e, uint32_t than) const {
    if (next_[e].saved != next_[than].saved) return next_[e].saved > next_[than].saved;
    return per_copy(e) > per_copy(than);
  }
  double per_copy(uint32_t e) const {
    double sum = 0;
    for (size_t s = 0; s < topology_.sources; ++s) sum += routing_.tokens_from(s, e);
    return sum / static_cast<double>(chosen_[e].size());
  }

  void choose_first(uint32_t e) {
    uint32_t best = 0;
    double least = std::numeric_limits<double>::infinity();
    for (uint32_t r = 0; r < topology_.ranks; ++r) {
      double paid = 0;
      for (size_t s = 0; s < topology_.sources; ++s) paid += routing_.tokens_from(s, e) * topology_.at(s, r);
      if (paid < least) {
        least = paid;
        best = r;
      }
    }
    take(e, best);
  }

  void take(uint32_t e, uint32_t rank) {
    chosen_[e].push_back(rank);
    if (rank != kAnywhere) {
      for (size_t s = 0; s < topology_.sources; ++s) {
        distance_[e][s] = std::min(distance_[e][s], topology_.at(s, rank));
      }
    }
    Next next;
    for (uint32_t r = 0; r < topology_.ranks; ++r) {
      double saved = 0;
      for (size_t s = 0; s < topology_.sources; ++s) {
        saved += routing_.tokens_from(s, e) * std::max(0.0, distance_[e][s] - topology_.at(s, r));
      }
      if (saved > next.saved) next = {.saved = saved, .rank = r};
    }
    next_[e] = next;
  }

  // Each source's tokens to the nearest chosen copy, the first of equals; copies placed anywhere then share with the
  // heaviest part.
  void append_parts(uint32_t e, std::vector<Part>& parts) const {
    const size_t begin = parts.size();
    std::vector<uint32_t> ranks;
    for (const uint32_t rank : chosen_[e]) {
      if (rank == kAnywhere) continue;
      ranks.push_back(rank);
      parts.push_back({.expert = e, .tokens = std::vector<double>(topology_.sources, 0.0)});
    }
    for (size_t s = 0; s < topology_.sources; ++s) {
      size_t nearest = 0;
      for (size_t c = 1; c < ranks.size(); ++c) {
        if (topology_.at(s, ranks[c]) < topology_.at(s, ranks[nearest])) nearest = c;
      }
      parts[begin + nearest].tokens[s] = routing_.tokens_from(s, e);
    }
    for (size_t copy = ranks.size(); copy < chosen_[e].size(); ++copy) {
      size_t heaviest = begin;
      for (size_t p = begin + 1; p < parts.size(); ++p) {
        if (tokens_of(parts[p]) > tokens_of(parts[heaviest])) heaviest = p;
      }
      for (double& tokens : parts[heaviest].tokens) tokens /= 2;
      parts.push_back(parts[heaviest]);
    }
  }

  const LayerRouting& routing_;
  const Topology& topology_;
  std::vector<std::vector<double>> distance_;  // [E][S]: to the nearest chosen copy
  std::vector<Next> next_;                     // [E]
  std::vector<std::vector<uint32_t>> chosen_;  // [E]: where copies would be best, or kAnywhere
};

// ------------------------------------------------------------------------------------- what a slot holds

class SlotSearch {
 public:
  SlotSearch(const LayerRouting& routing, const std::vector<std::vector<uint32_t>>& on_rank)
      : routing_(routing),
        problem_(routing.problem()),
        ranks_(problem_.ranks()),
        on_rank_(on_rank),
        holders_(problem_.traffic.experts),
        flows_(problem_.traffic.experts),
        loads_(ranks_, 0.0) {
    for (uint32_t r = 0; r < ranks_; ++r) {
      for (const uint32_t e : on_rank_[r]) holders_[e].push_back(r);
    }
    for (uint32_t e = 0; e < holders_.size(); ++e) {
      routing_.route(e, holders_[e], flows_[e]);
      add_load(loads_, holders_[e], flows_[e], 1);
    }
    least_gain_ = 1e-10 * (1 + problem_.weights.alpha * routing_.mean_load() * ranks_);
  }

  std::vector<std::vector<uint32_t>> run() {
    for (uint32_t pass = 0; pass < kPasses && improve(); ++pass) {
    }
    return holders_;
  }

 private:
  static constexpr uint32_t kPasses = 8;

  // An expert with one holder changed: what that costs but for the loads, and the new loads it makes.
  struct Change {
    uint32_t expert = 0;
    std::vector<uint32_t> holders;
    ExpertFlow flow;
    double cost = 0;
  };

  static void add_load(std::vector<double>& loads, std::span<const uint32_t> holders, const ExpertFlow& flow,
                       double sign) {
    for (size_t h = 0; h < holders.size(); ++h) loads[holders[h]] += sign * flow.load[h];
  }

  double load_price(std::span<const double> loads) const {
    const double mean = routing_.mean_load(), cap = problem_.load_cap * mean;
    double price = 0;
    for (const double load : loads) {
      price += problem_.weights.beta * std::abs(load - mean);
      // Far above what any token pays.
      if (load > cap) price += 1e3 * (1 + problem_.weights.alpha + problem_.weights.gamma) * (load - cap);
    }
    return price;
  }

  bool holds(uint32_t rank, uint32_t e) const {
    return std::binary_search(holders_[e].begin(), holders_[e].end(), rank);
  }

  // `from` loses it, `to` gets it; ranks_ stands for none.
  void change(uint32_t e, uint32_t from, uint32_t to, Change& out) const {
    out.expert = e;
    out.holders.clear();
    for (const uint32_t r : holders_[e]) {
      if (r != from) out.holders.push_back(r);
    }
    out.cost = 0;
    if (from != ranks_) out.cost -= routing_.move_cost(e, from);
    if (to != ranks_) {
      out.holders.insert(std::lower_bound(out.holders.begin(), out.holders.end(), to), to);
      out.cost += routing_.move_cost(e, to);
    }
    routing_.route(e, out.holders, out.flow);
    out.cost += problem_.weights.alpha * (out.flow.communication - flows_[e].communication);
  }

  // Takes both if that pays.
  bool take_if_better(const Change& a, const Change& b) {
    if (a.cost + b.cost - price_ >= -least_gain_) return false;  // loads cannot gain more than their price
    trial_ = loads_;
    for (const Change* change : {&a, &b}) {
      add_load(trial_, holders_[change->expert], flows_[change->expert], -1);
      add_load(trial_, change->holders, change->flow, 1);
    }
    const double price = load_price(trial_);
    if (a.cost + b.cost + price - price_ >= -least_gain_) return false;
    loads_ = trial_;
    price_ = price;
    for (const Change* change : {&a, &b}) {
      holders_[change->expert] = change->holders;
      flows_[change->expert] = change->flow;
    }
    return true;
  }

  bool try_swap(uint32_t a, uint32_t i, uint32_t b, uint32_t j) {
    const uint32_t e = on_rank_[a][i], f = on_rank_[b][j];
    if (e == f || holds(b, e) || holds(a, f)) return false;
    change(f, b, a, second_);
    if (!take_if_better(first_, second_)) return false;
    std::swap(on_rank_[a][i], on_rank_[b][j]);
    return true;
  }

  // A copy makes room for one of another expert.
  bool try_replace(uint32_t a, uint32_t i, uint32_t f) {
    const uint32_t e = on_rank_[a][i];
    if (holders_[e].size() < 2 || e == f || holds(a, f)) return false;
    change(e, a, ranks_, first_);
    change(f, ranks_, a, second_);
    if (!take_if_better(first_, second_)) return false;
    on_rank_[a][i] = f;
    return true;
  }

  bool improve() {
    bool better = false;
    price_ = load_price(loads_);
    for (uint32_t a = 0; a < ranks_; ++a) {
      for (uint32_t i = 0; i < on_rank_[a].size(); ++i) {
        for (uint32_t f = 0; f < holders_.size(); ++f) better = try_replace(a, i, f) || better;
        for (uint32_t b = a + 1; b < ranks_; ++b) better = try_swaps(a, i, b) || better;
      }
    }
    return better;
  }

  bool try_swaps(uint32_t a, uint32_t i, uint32_t b) {
    bool better = false;
    for (uint32_t j = 0; j < on_rank_[b].size(); ++j) {
      if (holds(b, on_rank_[a][i])) return better;
      if (j == 0 || better) change(on_rank_[a][i], a, b, first_);
      better = try_swap(a, i, b, j) || better;
    }
    return better;
  }

  const LayerRouting& routing_;
  const Problem& problem_;
  uint32_t ranks_;
  std::vector<std::vector<uint32_t>> on_rank_;  // [R][slots]
  std::vector<std::vector<uint32_t>> holders_;  // [E]
  std::vector<ExpertFlow> flows_;               // [E], of holders_
  std::vector<double> loads_, trial_;           // [R]
  double price_ = 0, least_gain_ = 0;
  Change first_, second_;
};

// Two parts of an expert may have settled on one rank. The later one then changes places with a slot elsewhere whose
// expert neither rank would hold twice.
void part_twins(std::vector<std::vector<uint32_t>>& on_rank) {
  const auto has = [](const std::vector<uint32_t>& list, uint32_t e) {
    return std::find(list.begin(), list.end(), e) != list.end();
  };
  const auto move_away = [&](size_t r, size_t i) {
    const uint32_t twin = on_rank[r][i];
    for (size_t to = 0; to < on_rank.size(); ++to) {
      if (to == r || has(on_rank[to], twin)) continue;
      for (uint32_t& other : on_rank[to]) {
        if (has(on_rank[r], other)) continue;
        std::swap(on_rank[r][i], other);
        return;
      }
    }
  };
  for (size_t r = 0; r < on_rank.size(); ++r) {
    for (size_t i = 1; i < on_rank[r].size(); ++i) {
      const auto here = on_rank[r].begin() + static_cast<std::ptrdiff_t>(i);
      if (std::find(on_rank[r].begin(), here, *here) != here) move_away(r, i);
    }
  }
}

// What is still twice on one rank makes room for an expert that is not there.
void replace_twins(std::vector<std::vector<uint32_t>>& on_rank, uint32_t experts) {
  for (std::vector<uint32_t>& list : on_rank) {
    for (size_t i = 1; i < list.size(); ++i) {
      const auto here = list.begin() + static_cast<std::ptrdiff_t>(i);
      if (std::find(list.begin(), here, *here) == here) continue;
      for (uint32_t e = 0; e < experts; ++e) {
        if (std::find(list.begin(), list.end(), e) != list.end()) continue;
        *here = e;
        break;
      }
    }
  }
}

}  // namespace

std::vector<std::vector<uint32_t>> place_copies(const LayerRouting& routing, Settler& settler) {
  const Problem& problem = routing.problem();
  Splitter splitter(routing);
  for (uint32_t i = 0; i < problem.redundant; ++i) splitter.add_copy();
  const std::vector<Part> parts = splitter.parts();

  const size_t ranks = problem.ranks();
  std::vector<double> cost(parts.size() * ranks, 0.0), load;
  for (size_t p = 0; p < parts.size(); ++p) {
    for (uint32_t r = 0; r < ranks; ++r) {
      double& paid = cost[p * ranks + r];
      for (size_t s = 0; s < problem.topology.sources; ++s) paid += parts[p].tokens[s] * problem.topology.at(s, r);
      paid = problem.weights.alpha * paid + routing.move_cost(parts[p].expert, r);
    }
    load.push_back(tokens_of(parts[p]));
  }
  const Rows rows{.cost = cost,
                  .load = load,
                  .ranks = problem.ranks(),
                  .beta = problem.weights.beta,
                  .load_cap = problem.load_cap * routing.mean_load()};
  const Settled settled = settler.settle(rows);
  std::vector<std::vector<uint32_t>> on_rank(ranks);
  for (size_t p = 0; p < parts.size(); ++p) on_rank[settled.rank[p]].push_back(parts[p].expert);
  part_twins(on_rank);
  replace_twins(on_rank, problem.traffic.experts);
  return SlotSearch(routing, on_rank).run();
}

}  // namespace kindred::place
