#include "place/problem.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "place/routing.h"

namespace kindred::place {
namespace {

constexpr double kMostTokens = 0x1p53;
constexpr double kMostWeight = 1e12;  // of a token or a move; no product of these overflows

// What any of ours should ever meet; keeps sizes far from overflow.
constexpr uint64_t kMostLayers = 1024, kMostSources = 4096, kMostExperts = 65'536, kMostRanks = 4096;
constexpr uint64_t kMostCells = 1ULL << 28;

Status check_sizes(const Traffic& traffic) {
  if (traffic.layers < 1 || traffic.layers > kMostLayers) {
    return invalid(fmt::format("{} layers; accepted: 1 to {}", traffic.layers, kMostLayers), "layers");
  }
  if (traffic.sources < 1 || traffic.sources > kMostSources) {
    return invalid(fmt::format("{} sources; accepted: 1 to {}", traffic.sources, kMostSources), "sources");
  }
  if (traffic.experts < 1 || traffic.experts > kMostExperts) {
    return invalid(fmt::format("{} experts; accepted: 1 to {}", traffic.experts, kMostExperts), "experts");
  }
  const uint64_t cells = uint64_t{traffic.layers} * traffic.layer_cells();
  if (cells > kMostCells) return invalid(fmt::format("more than {} cells of traffic", kMostCells), "A");
  if (traffic.tokens.size() != cells) {
    return invalid(fmt::format("{} numbers are not {} layers x {} sources x {} experts", traffic.tokens.size(),
                               traffic.layers, traffic.sources, traffic.experts),
                   "A");
  }
  return {};
}

}  // namespace

std::vector<double> Traffic::load(size_t l) const {
  std::vector<double> load(experts, 0.0);
  const std::span<const double> cells = layer(l);
  for (size_t s = 0; s < sources; ++s) {
    for (size_t e = 0; e < experts; ++e) load[e] += cells[s * experts + e];
  }
  return load;
}

Status Traffic::check() const {
  if (Status sizes = check_sizes(*this); !sizes) return sizes;
  double sum = 0;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (!std::isfinite(tokens[i]) || tokens[i] < 0) {
      return invalid(fmt::format("layer {}, source {}, expert {}: {} is not a number of tokens", i / layer_cells(),
                                 i / experts % sources, i % experts, tokens[i]),
                     "A");
    }
    sum += tokens[i];
  }
  if (sum > kMostTokens) return invalid(fmt::format("{:.3g} tokens are more than 2^53", sum), "A");
  if (sum == 0) return invalid("no tokens at all: there is nothing to place by", "A");
  return {};
}

// -------------------------------------------------------------------------------------------- topology

Status Topology::check() const {
  if (ranks < 1 || ranks > kMostRanks) {
    return invalid(fmt::format("{} ranks; accepted: 1 to {}", ranks, kMostRanks), "ranks");
  }
  if (distance.size() != size_t{sources} * ranks) {
    return invalid(fmt::format("{} numbers are not {} sources x {} ranks", distance.size(), sources, ranks),
                   "distance");
  }
  for (const double d : distance) {
    if (!(d >= 0) || d > kMostWeight) {
      return invalid(fmt::format("{}; accepted: 0 to {:g}", d, kMostWeight), "distance");
    }
  }
  return {};
}

RankRange ranks_of_source(uint32_t source, uint32_t sources, uint32_t ranks) {
  const auto edge = [&](uint64_t s) { return static_cast<uint32_t>(s * ranks / sources); };
  const uint32_t begin = edge(source);
  return {begin, std::max(begin + 1, edge(uint64_t{source} + 1))};
}

Result<Topology> tiered_topology(uint32_t sources, uint32_t ranks, const Tiers& tiers) {
  if (sources < 1) return invalid("0 sources; accepted: 1 or more", "sources");
  if (ranks < 1 || ranks > kMostRanks) {
    return invalid(fmt::format("{} ranks; accepted: 1 to {}", ranks, kMostRanks), "ranks");
  }
  const uint32_t per_node = tiers.ranks_per_node > 0 ? tiers.ranks_per_node : ranks;
  const uint64_t per_rack = tiers.nodes_per_rack > 0 ? uint64_t{per_node} * tiers.nodes_per_rack : ranks;
  Topology topology{.sources = sources, .ranks = ranks, .distance = std::vector<double>(size_t{sources} * ranks)};
  for (uint32_t s = 0; s < sources; ++s) {
    const RankRange own = ranks_of_source(s, sources, ranks);
    for (uint32_t r = 0; r < ranks; ++r) {
      double least = std::numeric_limits<double>::infinity();
      for (uint32_t o = own.begin; o < own.end; ++o) {
        const double step = o == r                         ? 0
                            : o / per_node == r / per_node ? tiers.same_node
                            : o / per_rack == r / per_rack ? tiers.same_rack
                                                           : tiers.far;
        least = std::min(least, step);
      }
      topology.distance[size_t{s} * ranks + r] = least;
    }
  }
  if (Status good = topology.check(); !good) return std::move(good).error();
  return topology;
}

Result<Topology> topology_from_rank_distances(uint32_t sources, uint32_t ranks, std::span<const double> between) {
  if (sources < 1 || ranks < 1 || between.size() != size_t{ranks} * ranks) {
    return invalid(fmt::format("{} numbers are not {} x {} ranks", between.size(), ranks, ranks), "distance");
  }
  const auto at = [&](uint32_t from, uint32_t to) { return between[size_t{from} * ranks + to]; };
  double nearest = std::numeric_limits<double>::infinity();  // remote
  for (uint32_t from = 0; from < ranks; ++from) {
    for (uint32_t to = 0; to < ranks; ++to) {
      const double extra = at(from, to) - at(from, from);
      if (!std::isfinite(extra) || extra < 0) {
        return invalid(fmt::format("rank {} is nearer to {} than to itself", from, to), "distance");
      }
      if (from != to && extra > 0) nearest = std::min(nearest, extra);
    }
  }
  if (!std::isfinite(nearest)) nearest = 1;  // all are equally near
  Topology topology{.sources = sources, .ranks = ranks, .distance = std::vector<double>(size_t{sources} * ranks)};
  for (uint32_t s = 0; s < sources; ++s) {
    const RankRange own = ranks_of_source(s, sources, ranks);
    for (uint32_t r = 0; r < ranks; ++r) {
      double least = std::numeric_limits<double>::infinity();
      for (uint32_t o = own.begin; o < own.end; ++o) least = std::min(least, (at(o, r) - at(o, o)) / nearest);
      topology.distance[size_t{s} * ranks + r] = least;
    }
  }
  return topology;
}

// ------------------------------------------------------------------------------------------- placement

std::span<const Copy> Placement::layer_copies(size_t l) const {
  const auto before = [](const Copy& copy, size_t layer) { return copy.layer < layer; };
  const auto begin = std::lower_bound(copies.begin(), copies.end(), l, before);
  const auto end = std::lower_bound(begin, copies.end(), l + 1, before);
  return {begin, end};
}

std::vector<std::vector<uint32_t>> Placement::holders(size_t l) const {
  std::vector<std::vector<uint32_t>> ranks_of(experts);
  for (size_t e = 0; e < experts; ++e) ranks_of[e].push_back(layer(l)[e]);
  for (const Copy& copy : layer_copies(l)) ranks_of[copy.expert].push_back(copy.rank);
  for (std::vector<uint32_t>& list : ranks_of) {
    std::sort(list.begin(), list.end());
    list.erase(std::unique(list.begin(), list.end()), list.end());
  }
  return ranks_of;
}

Status Placement::check(uint32_t slots) const {
  if (rank.size() != size_t{layers} * experts) {
    return invalid(fmt::format("{} ranks are not {} layers x {} experts", rank.size(), layers, experts), "placement");
  }
  if (!std::is_sorted(copies.begin(), copies.end())) return invalid("copies are not sorted", "placement");
  std::vector<uint32_t> held;
  const auto add = [&](size_t l, size_t e, uint32_t r) -> Status {
    if (r >= ranks) {
      return invalid(fmt::format("layer {}, expert {}: there is no rank {} of {}", l, e, r, ranks), "placement");
    }
    ++held[r];
    return {};
  };
  for (size_t l = 0; l < layers; ++l) {
    held.assign(ranks, 0);
    for (size_t e = 0; e < experts; ++e) {
      if (Status good = add(l, e, layer(l)[e]); !good) return good;
    }
    for (const Copy& copy : layer_copies(l)) {
      if (copy.expert >= experts) {
        return invalid(fmt::format("layer {}: there is no expert {} of {}", l, copy.expert, experts), "placement");
      }
      if (Status good = add(l, copy.expert, copy.rank); !good) return good;
    }
    for (uint32_t r = 0; r < ranks; ++r) {
      if (held[r] != slots) {
        return invalid(fmt::format("layer {}: rank {} holds {} experts; it has {} slots", l, r, held[r], slots),
                       "placement");
      }
    }
  }
  if (!copies.empty() && copies.back().layer >= layers) {
    return invalid(fmt::format("a copy in layer {} of {}", copies.back().layer, layers), "placement");
  }
  return {};
}

// --------------------------------------------------------------------------------------------- problem

Status Problem::check() const {
  if (Status good = traffic.check(); !good) return good;
  if (Status good = topology.check(); !good) return good;
  if (topology.sources != traffic.sources) {
    return invalid(fmt::format("{} sources, but traffic has {}", topology.sources, traffic.sources), "distance");
  }
  if (ranks() > traffic.experts) {
    return invalid(
        fmt::format("{} ranks for {} experts; accepted: at most one rank per expert", ranks(), traffic.experts),
        "ranks");
  }
  if ((uint64_t{traffic.experts} + redundant) % ranks() != 0) {
    return invalid(fmt::format("{} experts and {} redundant slots do not fill {} ranks evenly; redundant slots that "
                               "do: {}, {}",
                               traffic.experts, redundant, ranks(), (ranks() - traffic.experts % ranks()) % ranks(),
                               (ranks() - traffic.experts % ranks()) % ranks() + ranks()),
                   "redundant");
  }
  if (slots() > traffic.experts) {
    return invalid(
        fmt::format("{} slots a rank for {} experts; accepted: at most one slot per expert", slots(), traffic.experts),
        "redundant");
  }
  for (const double weight : {weights.alpha, weights.beta, weights.gamma}) {
    if (!(weight >= 0) || weight > kMostWeight) {
      return invalid(fmt::format("{}; accepted: 0 to {:g}", weight, kMostWeight), "weights");
    }
  }
  if (!(load_cap >= 1)) return invalid(fmt::format("{}; accepted: 1 or more", load_cap), "load_cap");
  if (!transitions.empty() && transitions.size() != size_t{traffic.layers - 1} * traffic.experts * traffic.experts) {
    return invalid(fmt::format("{} numbers are not {} x {} x {}", transitions.size(), traffic.layers - 1,
                               traffic.experts, traffic.experts),
                   "transitions");
  }
  if (groups < 1 || nodes < 1) return invalid("0; accepted: 1 or more", groups < 1 ? "groups" : "nodes");
  if (old.empty()) return {};
  if (old.layers != traffic.layers || old.experts != traffic.experts || old.ranks != ranks()) {
    return invalid(fmt::format("{} layers x {} experts on {} ranks; traffic has {} x {}, and there are {} ranks",
                               old.layers, old.experts, old.ranks, traffic.layers, traffic.experts, ranks()),
                   "placement");
  }
  return old.check(slots());
}

// ---------------------------------------------------------------------------------------------- costs

Cost& Cost::operator+=(const Cost& other) {
  communication += other.communication;
  remote_tokens += other.remote_tokens;
  tokens += other.tokens;
  imbalance += other.imbalance;
  moves += other.moves;
  objective += other.objective;
  max_load += other.max_load;
  mean_load += other.mean_load;
  return *this;
}

Cost total(std::span<const Cost> layers) {
  Cost sum;
  for (const Cost& layer : layers) sum += layer;
  return sum;
}

std::vector<Cost> evaluate(const Problem& problem, const Placement& placement) {
  std::vector<Cost> costs(problem.traffic.layers);
  for (size_t l = 0; l < costs.size(); ++l) {
    LayerRouting routing(problem, l);
    costs[l] = routing.cost(placement.holders(l));
  }
  return costs;
}

std::vector<double> rank_loads(const Problem& problem, const Placement& placement) {
  std::vector<double> loads;
  for (size_t l = 0; l < problem.traffic.layers; ++l) {
    LayerRouting routing(problem, l);
    routing.cost(placement.holders(l));
    loads.insert(loads.end(), routing.loads().begin(), routing.loads().end());
  }
  return loads;
}

}  // namespace kindred::place
