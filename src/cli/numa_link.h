// How fast a NUMA node reads another one's memory.
//
// Thread-safety: measures on threads of its own, one at a time; blocks its caller.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/rank_topology.h"

namespace kindred::cli {

struct NumaLink {
  uint32_t reader = 0, memory = 0;  // nodes
  double bytes_per_s = 0;           // one thread that reads in order
};

// Every pair of nodes, the node itself included; none where there is one node. A thread on each node writes `bytes`
// first, so that they lie there; bytes beyond the caches tell memory from them.
std::vector<NumaLink> measure_numa_links(std::span<const engine::NumaNode> nodes, size_t bytes);

}  // namespace kindred::cli
