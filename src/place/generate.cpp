#include "place/generate.h"

#include <algorithm>
#include <cmath>

#include "base/rng.h"
#include "place/solvers.h"

namespace kindred::place {
namespace {

struct KindShape {
  double lean;        // an expert's own source sends so many times what others do
  double skew;        // exponent of Zipf's law over experts; 0: uniform
  double mean;        // tokens per pair of source and expert
  double present;     // share of pairs that are not zero
  bool hot, one_source;
};

KindShape shape_of(TrafficKind kind) {
  switch (kind) {
    case TrafficKind::kAffinity: return {6, 0, 1000, 1, false, false};
    case TrafficKind::kWeakAffinity: return {1.3, 0, 1000, 1, false, false};
    case TrafficKind::kBalancedSources: return {1, 0.3, 1000, 1, false, false};
    case TrafficKind::kZipf: return {4, 1.1, 1000, 1, false, false};
    case TrafficKind::kHot: return {4, 0, 400, 1, true, false};
    case TrafficKind::kSparse: return {3, 0, 30, 0.2, false, false};
    case TrafficKind::kOneSource: return {1, 0.6, 1000, 1, false, true};
  }
  return {1, 0, 1, 1, false, false};
}

// How often the experts of a layer are used, in a random order; they sum to their number.
std::vector<double> popularity(const KindShape& kind, uint32_t experts, Rng& rng) {
  std::vector<double> weight(experts);
  double sum = 0;
  for (uint32_t e = 0; e < experts; ++e) sum += weight[e] = std::pow(1.0 + e, -kind.skew);
  for (double& w : weight) w *= experts / sum;
  if (kind.hot) {
    for (uint32_t e = 0; e < std::min(2U, experts); ++e) weight[e] = experts / 6.0;
  }
  for (uint32_t e = experts; e > 1; --e) std::swap(weight[e - 1], weight[rng.below(e)]);
  return weight;
}

}  // namespace

std::string_view to_string(TrafficKind kind) {
  switch (kind) {
    case TrafficKind::kAffinity: return "affinity";
    case TrafficKind::kWeakAffinity: return "weak affinity";
    case TrafficKind::kBalancedSources: return "balanced sources";
    case TrafficKind::kZipf: return "zipf";
    case TrafficKind::kHot: return "hot";
    case TrafficKind::kSparse: return "sparse";
    case TrafficKind::kOneSource: return "one source";
  }
  return "unknown";
}

Traffic generate_traffic(TrafficKind kind, const TrafficShape& shape, uint64_t seed) {
  const KindShape of = shape_of(kind);
  Traffic traffic{.layers = shape.layers, .sources = shape.sources, .experts = shape.experts};
  Rng rng(seed);
  for (uint32_t l = 0; l < shape.layers; ++l) {
    const std::vector<double> popular = popularity(of, shape.experts, rng);
    std::vector<uint64_t> own(shape.experts);
    for (uint64_t& source : own) source = rng.below(shape.sources);
    for (uint32_t s = 0; s < shape.sources; ++s) {
      for (uint32_t e = 0; e < shape.experts; ++e) {
        const double lean = own[e] == s ? of.lean : 1;
        const double noise = 0.5 + rng.uniform();
        const bool there = rng.uniform() < of.present && (!of.one_source || s == 0);
        traffic.tokens.push_back(there ? std::floor(1 + of.mean * popular[e] * lean * noise) : 0);
      }
    }
  }
  return traffic;
}

Traffic drifted(const Traffic& traffic, double change, uint64_t seed) {
  Traffic next = traffic;
  Rng rng(seed);
  for (double& tokens : next.tokens) tokens = std::floor(tokens * (1 + change * (2 * rng.uniform() - 1)));
  return next;
}

Problem generate_problem(TrafficKind kind, const TrafficShape& shape, uint32_t ranks, uint64_t seed) {
  Problem problem;
  problem.traffic = generate_traffic(kind, shape, seed);
  Result<Topology> topology = tiered_topology(shape.sources, ranks);
  KINDRED_CHECK(topology.ok());
  problem.topology = *std::move(topology);
  problem.old = place_linear(problem);
  return problem;
}

}  // namespace kindred::place
