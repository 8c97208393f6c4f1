// The two baselines that place by affinity: MoETuner's between layers, Sem-MoE's within classes of requests.
//
// Both papers solve their problems with their own programs; these are their objectives, solved with our means
// (exact assignment, swap descent), so that they are compared at their best.

#include <algorithm>
#include <cmath>

#include "expert/kmeans.h"
#include "place/settle.h"
#include "place/solvers.h"

namespace kindred::place {
namespace {

// benefit[f, r]: tokens of expert f of layer l that come from an expert of layer l - 1 on rank r.
std::vector<double> kept_tokens(const Problem& problem, size_t layer, std::span<const uint32_t> before) {
  const size_t experts = problem.traffic.experts, ranks = problem.ranks(), sources = problem.traffic.sources;
  std::vector<double> kept(experts * ranks, 0.0);
  if (!problem.transitions.empty()) {
    const float* from = problem.transitions.data() + (layer - 1) * experts * experts;
    for (size_t e = 0; e < experts; ++e) {
      for (size_t f = 0; f < experts; ++f) kept[f * ranks + before[e]] += static_cast<double>(from[e * experts + f]);
    }
    return kept;
  }
  // Within a source as if independent: tokens on rank r before, as a share, times the tokens of f now.
  const std::span<const double> was = problem.traffic.layer(layer - 1), is = problem.traffic.layer(layer);
  for (size_t s = 0; s < sources; ++s) {
    std::vector<double> share(ranks, 0.0);
    double sum = 0;
    for (size_t e = 0; e < experts; ++e) {
      share[before[e]] += was[s * experts + e];
      sum += was[s * experts + e];
    }
    if (sum == 0) continue;
    for (size_t f = 0; f < experts; ++f) {
      for (size_t r = 0; r < ranks; ++r) kept[f * ranks + r] += is[s * experts + f] * share[r] / sum;
    }
  }
  return kept;
}

// Rows for the E experts and as many empty ones as fill the ranks; the latter are free everywhere.
struct PaddedRows {
  std::vector<double> cost, load;
};

PaddedRows padded(const Problem& problem, size_t layer) {
  const size_t rows = size_t{problem.slots()} * problem.ranks();
  PaddedRows out{.cost = std::vector<double>(rows * problem.ranks(), 0.0), .load = problem.traffic.load(layer)};
  out.load.resize(rows, 0.0);
  return out;
}

std::vector<uint32_t> settle_layer(const Problem& problem, const PaddedRows& rows, Settler& settler) {
  const Rows view{.cost = rows.cost, .load = rows.load, .ranks = problem.ranks(), .beta = problem.weights.beta};
  std::vector<uint32_t> rank = settler.settle(view).rank;
  rank.resize(problem.traffic.experts);
  return rank;
}

// Unit vectors over the sources, [E, S]: who uses an expert. Unused ones are zero.
std::vector<float> source_profiles(const Problem& problem, size_t layer) {
  const size_t experts = problem.traffic.experts, sources = problem.traffic.sources;
  const std::span<const double> tokens = problem.traffic.layer(layer);
  std::vector<float> profile(experts * sources, 0.0F);
  for (size_t e = 0; e < experts; ++e) {
    double norm = 0;
    for (size_t s = 0; s < sources; ++s) norm += tokens[s * experts + e] * tokens[s * experts + e];
    if (norm == 0) continue;
    for (size_t s = 0; s < sources; ++s) {
      profile[e * sources + s] = static_cast<float>(tokens[s * experts + e] / std::sqrt(norm));
    }
  }
  return profile;
}

// One start per rank: the class that owns it; a rank that nobody owns stands for all.
std::vector<float> class_starts(const Problem& problem) {
  const size_t sources = problem.traffic.sources;
  std::vector<float> start(problem.ranks() * sources, 0.0F);
  for (size_t r = 0; r < problem.ranks(); ++r) {
    double norm = 0;
    for (size_t s = 0; s < sources; ++s) norm += problem.topology.at(s, r) == 0 ? 1 : 0;
    for (size_t s = 0; s < sources; ++s) {
      const bool in = norm == 0 || problem.topology.at(s, r) == 0;
      start[r * sources + s] =
          in ? static_cast<float>(1 / std::sqrt(norm == 0 ? static_cast<double>(sources) : norm)) : 0;
    }
  }
  return start;
}

}  // namespace

Placement place_moetuner(const Problem& problem) {
  Placement placement{
      .layers = problem.traffic.layers, .experts = problem.traffic.experts, .ranks = problem.ranks()};
  Settler settler;
  std::vector<uint32_t> before;
  for (size_t l = 0; l < placement.layers; ++l) {
    PaddedRows rows = padded(problem, l);
    if (l > 0) {
      const std::vector<double> kept = kept_tokens(problem, l, before);
      for (size_t i = 0; i < kept.size(); ++i) rows.cost[i] = -kept[i];
    }
    before = settle_layer(problem, rows, settler);
    placement.rank.insert(placement.rank.end(), before.begin(), before.end());
    copy_by_load(problem, l, before, placement.copies);
  }
  return placement;
}

Placement place_sem_moe(const Problem& problem) {
  Placement placement{
      .layers = problem.traffic.layers, .experts = problem.traffic.experts, .ranks = problem.ranks()};
  const std::vector<float> starts = class_starts(problem);
  for (size_t l = 0; l < placement.layers; ++l) {
    const std::vector<float> profiles = source_profiles(problem, l);
    const expert::Points points{.data = profiles, .dims = problem.traffic.sources};
    const Result<expert::Clustering> clusters = expert::kmeans_from(points, starts, 8);
    KINDRED_CHECK(clusters.ok());
    placement.rank.insert(placement.rank.end(), clusters->assignment.begin(), clusters->assignment.end());
    copy_by_load(problem, l, clusters->assignment, placement.copies);
  }
  return placement;
}

}  // namespace kindred::place
