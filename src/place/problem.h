// Where experts sit and what that costs: the words of all that places experts.
//
// A placement gives every expert of every layer a rank. Tokens come from sources (engines); a token that source s
// sends to rank r costs distance[s, r]. Objective of a layer (Gimbal, section 5.2; design, "Placement"):
//   alpha * sum tokens * distance + beta * sum_r |load_r - mean| + gamma * moves,
// where load_r is the tokens that rank r works on, and a move is an expert on a rank that did not hold it before.
//
// With redundant slots an expert may have copies on several ranks. A source then sends its tokens to the nearest of
// them; equally near ones share alike.
//
// Units: tokens are (token, expert) pairs, as the experts count them. Layers are independent of each other.
// Thread-safety: plain values and pure functions.
#pragma once

#include <compare>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "base/result.h"

namespace kindred::place {

// A[l, s, e]: tokens from source s to expert e.
struct Traffic {
  uint32_t layers = 0, sources = 0, experts = 0;
  std::vector<double> tokens = {};  // [L, S, E] row-major

  size_t layer_cells() const { return size_t{sources} * experts; }
  std::span<const double> layer(size_t l) const { return {tokens.data() + l * layer_cells(), layer_cells()}; }
  std::vector<double> load(size_t l) const;  // B[l, :], [E]

  // Error: kInvalid: wrong size, not finite, negative, all zero, or a sum beyond 2^53 (where doubles stop counting).
  Status check() const;
};

// What a token pays on its way: [S, R], 0 to 1e12; 0 where the source owns the rank.
struct Topology {
  uint32_t sources = 0, ranks = 0;
  std::vector<double> distance = {};

  double at(size_t source, size_t rank) const { return distance[source * ranks + rank]; }
  Status check() const;
};

// Which ranks belong to a source: [s * R / S, (s + 1) * R / S), and at least one; with more sources than ranks
// several share a rank.
struct RankRange {
  uint32_t begin = 0, end = 0;
};
RankRange ranks_of_source(uint32_t source, uint32_t sources, uint32_t ranks);

// Ranks are numbered node by node and rack by rack. A source's own ranks cost 0.
struct Tiers {
  uint32_t ranks_per_node = 0;  // 0: all on one node
  uint32_t nodes_per_rack = 0;  // 0: all in one rack
  double same_node = 1, same_rack = 1, far = 1;
};
// Error: kInvalid: no sources or ranks, or a cost that is negative or not finite.
Result<Topology> tiered_topology(uint32_t sources, uint32_t ranks, const Tiers& tiers = {});

// From distances between ranks [R, R] in any unit, as `numactl --hardware` prints them between nodes: local becomes
// 0 and the nearest remote rank 1. A source is as far from a rank as its nearest own rank. Error: kInvalid.
Result<Topology> topology_from_rank_distances(uint32_t sources, uint32_t ranks, std::span<const double> between);

// A copy of an expert beside the first one.
struct Copy {
  uint32_t layer = 0, expert = 0, rank = 0;
  auto operator<=>(const Copy&) const = default;
};

struct Placement {
  uint32_t layers = 0, experts = 0, ranks = 0;
  std::vector<uint32_t> rank = {};  // [L, E]
  std::vector<Copy> copies = {};    // sorted. EPLB may put two copies of an expert on one rank.

  bool empty() const { return layers == 0; }
  std::span<const uint32_t> layer(size_t l) const { return {rank.data() + l * experts, experts}; }
  std::span<const Copy> layer_copies(size_t l) const;
  // [E]: the ranks that hold each expert of layer l, ascending, each once.
  std::vector<std::vector<uint32_t>> holders(size_t l) const;

  // Every layer has `slots` experts on each rank. Error: kInvalid, naming layer and rank or expert.
  Status check(uint32_t slots) const;
  bool operator==(const Placement&) const = default;
};

// Gimbal's calibrated weights; (1, 1, 0) are its uncalibrated ones.
struct Weights {
  double alpha = 1.0, beta = 0.0025, gamma = 1.0;
};

struct Problem {
  Traffic traffic;
  Topology topology;
  Placement old = {};      // empty: nothing is placed yet, and moves cost nothing
  uint32_t redundant = 0;  // slots a layer beyond one per expert
  Weights weights = {};
  // No rank's load in a layer may exceed this times the mean. `flow` and `exact` keep to it, or say that they cannot.
  double load_cap = std::numeric_limits<double>::infinity();
  // [L - 1, E, E]: tokens that go from an expert to one of the next layer; for `moetuner`. Empty: estimated from
  // traffic, as if a source's tokens chose experts of two layers independently.
  std::vector<float> transitions = {};
  uint32_t groups = 1, nodes = 1;  // of `eplb`: groups of experts that a node should hold whole

  uint32_t ranks() const { return topology.ranks; }
  uint32_t slots() const { return (traffic.experts + redundant) / topology.ranks; }  // a rank's, per layer
  // Error: kInvalid, naming the field and what is accepted.
  Status check() const;
};

struct Cost {
  double communication = 0;  // tokens * distance
  double remote_tokens = 0;  // tokens at a distance above 0
  double tokens = 0;
  double imbalance = 0;  // sum over ranks of |load - mean|, tokens
  double moves = 0;
  double objective = 0;
  double max_load = 0, mean_load = 0;  // of ranks; a sum over layers where several are added up

  double remote_share() const { return tokens > 0 ? remote_tokens / tokens : 0; }
  double max_over_mean() const { return mean_load > 0 ? max_load / mean_load : 1; }
  Cost& operator+=(const Cost& other);
};

// One Cost per layer. `problem` and `placement` have been checked and are of one shape.
std::vector<Cost> evaluate(const Problem& problem, const Placement& placement);
Cost total(std::span<const Cost> layers);

// Loads of ranks, tokens: [L, R].
std::vector<double> rank_loads(const Problem& problem, const Placement& placement);

}  // namespace kindred::place
