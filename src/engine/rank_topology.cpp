#include "engine/rank_topology.h"

#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <iterator>

namespace kindred::engine {
namespace {

bool read_number(std::string_view& text, uint32_t& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc()) return false;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return true;
}

}  // namespace

std::vector<uint32_t> parse_cpu_list(const std::string& text) {
  constexpr uint32_t kMostCpus = 1U << 16;
  std::vector<uint32_t> cpus;
  std::string_view rest = text;
  uint32_t first = 0;
  while (read_number(rest, first)) {
    uint32_t last = first;
    if (rest.starts_with('-')) {
      rest.remove_prefix(1);
      if (!read_number(rest, last)) break;
    }
    for (uint32_t cpu = first; cpu <= std::min(last, kMostCpus); ++cpu) cpus.push_back(cpu);
    if (!rest.starts_with(',')) break;
    rest.remove_prefix(1);
  }
  return cpus;
}

std::vector<uint32_t> allowed_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<uint32_t> cpus;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return cpus;
  for (uint32_t cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
  }
  return cpus;
}

std::vector<NumaNode> read_numa_nodes(const std::vector<uint32_t>& allowed, const std::string& folder) {
  std::vector<NumaNode> nodes;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    std::string_view rest = name;
    if (!rest.starts_with("node")) continue;
    rest.remove_prefix(4);
    NumaNode node;
    if (!read_number(rest, node.id) || !rest.empty()) continue;
    std::ifstream file(entry.path() / "cpulist");
    std::string list;
    std::getline(file, list);
    const std::vector<uint32_t> cpus = parse_cpu_list(list);
    std::ranges::set_intersection(cpus, allowed, std::back_inserter(node.cpus));
    if (!node.cpus.empty()) nodes.push_back(std::move(node));
  }
  std::ranges::sort(nodes, {}, &NumaNode::id);
  if (nodes.empty()) nodes.push_back({0, allowed});
  return nodes;
}

Result<uint32_t> parse_rank_count(std::string_view text, const std::vector<NumaNode>& nodes) {
  if (text == "auto") return nodes.size() > 1 ? static_cast<uint32_t>(nodes.size()) : 0;
  uint32_t ranks = 0;
  std::string_view rest = text;
  if (read_number(rest, ranks) && rest.empty() && ranks <= kMostRanks) return ranks;
  return invalid(fmt::format("--expert-ranks: got '{}', accepted: auto, or 0 to {}", text, kMostRanks), "expert_ranks");
}

std::vector<std::vector<uint32_t>> rank_cpus(const std::vector<NumaNode>& nodes, uint32_t ranks) {
  std::vector<std::vector<uint32_t>> out(ranks);
  const auto count = static_cast<uint32_t>(nodes.size());
  if (ranks <= count) {
    for (uint32_t n = 0; n < count; ++n) {
      auto& cpus = out[n * ranks / count];
      cpus.insert(cpus.end(), nodes[n].cpus.begin(), nodes[n].cpus.end());
    }
    return out;
  }
  for (uint32_t n = 0; n < count; ++n) {
    // The ranks r with r * count / ranks == n.
    const uint32_t first = (n * ranks + count - 1) / count, end = ((n + 1) * ranks + count - 1) / count;
    const size_t cpus = nodes[n].cpus.size(), sharing = end - first;
    if (cpus < sharing) continue;
    for (uint32_t r = first; r < end; ++r) {
      const auto from = nodes[n].cpus.begin();
      out[r].assign(from + static_cast<std::ptrdiff_t>((r - first) * cpus / sharing),
                    from + static_cast<std::ptrdiff_t>((r - first + 1) * cpus / sharing));
    }
  }
  return out;
}

bool pin_this_thread(const std::vector<uint32_t>& cpus) {
  if (cpus.empty()) return true;
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const uint32_t cpu : cpus) {
    if (cpu < CPU_SETSIZE) CPU_SET(cpu, &set);
  }
  return sched_setaffinity(0, sizeof set, &set) == 0;
}

}  // namespace kindred::engine
