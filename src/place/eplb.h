// Expert parallelism load balancing as DeepSeek's EPLB does it (github.com/deepseek-ai/EPLB): the hottest experts get
// more replicas, and replicas are packed so that ranks have alike to do. It knows loads, not where tokens come from.
//
// Hierarchical, where groups divide among nodes: groups are packed into nodes, replicas are made within a node and
// packed onto its ranks, so that an expert group stays on one node. Else everything is one group on one node.
//
// Packing: heaviest first, into the pack of least weight that has room; the lower index wins ties, and equal weights
// keep their order. (The reference sorts unstably in float32, so its order of equal weights is an accident.)
//
// Thread-safety: pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/result.h"
#include "place/problem.h"

namespace kindred::place {

struct EplbShape {
  uint32_t replicas = 0;  // physical experts, over all ranks
  uint32_t groups = 1, nodes = 1, ranks = 1;
};

struct EplbLayer {
  std::vector<uint32_t> expert_of;  // [replicas]: the expert in each slot; rank r owns [r, r + 1) * replicas / ranks
  std::vector<uint32_t> copies;     // [E]
};

// Of one layer; `load` [E] >= 0. Error: kInvalid: replicas < E, or ranks do not divide replicas, or (hierarchical)
// nodes do not divide ranks and groups, or groups do not divide E.
Result<EplbLayer> eplb_layer(std::span<const double> load, const EplbShape& shape);

// With problem.groups and problem.nodes. Error: as above.
Result<Placement> place_eplb(const Problem& problem);

}  // namespace kindred::place
