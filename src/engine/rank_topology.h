// Which processors each expert rank runs on: one rank per NUMA node, or equal shares of a node's processors.
//
// Thread-safety: pure functions of the system's files.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace kindred::engine {

struct NumaNode {
  uint32_t id = 0;
  std::vector<uint32_t> cpus;  // those this process may use
};

// Nodes with processors that `allowed` holds too. No such folder, or nothing in it: one node with them all.
std::vector<NumaNode> read_numa_nodes(const std::vector<uint32_t>& allowed,
                                      const std::string& folder = "/sys/devices/system/node");
std::vector<uint32_t> allowed_cpus();  // of this process, ascending

// How many expert ranks `text` asks for: a number up to kMostRanks, or "auto", a rank per node, and none where one node
// has all the memory. Error: kInvalid, naming expert_ranks.
inline constexpr uint32_t kMostRanks = 1024;
Result<uint32_t> parse_rank_count(std::string_view text, const std::vector<NumaNode>& nodes);

// "0-3,8,10-11"; what is not of that form is left out.
std::vector<uint32_t> parse_cpu_list(const std::string& text);

// Ranks over nodes in order; ranks that share a node share its processors without overlap. Empty lists where
// there are fewer processors than ranks: such ranks are not pinned.
std::vector<std::vector<uint32_t>> rank_cpus(const std::vector<NumaNode>& nodes, uint32_t ranks);

// Pins the calling thread; an empty list changes nothing. False: the system refused.
bool pin_this_thread(const std::vector<uint32_t>& cpus);

}  // namespace kindred::engine
