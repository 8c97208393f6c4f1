#include "cli/numa_link.h"

#include <algorithm>
#include <thread>

#include "cli/bench.h"

namespace kindred::cli {
namespace {

void run_on_node(const engine::NumaNode& node, const auto& work) {
  std::jthread thread([&] {
    (void)engine::pin_this_thread(node.cpus);
    work();
  });
}

// The best of a few: whatever else runs can only slow it down.
double read_bytes_per_s(std::span<const uint64_t> words) {
  constexpr int kTries = 5;
  double best_s = 0;
  for (int i = 0; i < kTries; ++i) {
    uint64_t sum = 0;
    const double took_s = seconds([&] {
      for (const uint64_t word : words) sum += word;
    });
    if (sum == 0) return 0;  // uses the sum; the words are not zero
    if (i == 0 || took_s < best_s) best_s = took_s;
  }
  return best_s > 0 ? static_cast<double>(words.size_bytes()) / best_s : 0;
}

}  // namespace

std::vector<NumaLink> measure_numa_links(std::span<const engine::NumaNode> nodes, size_t bytes) {
  std::vector<NumaLink> links;
  if (nodes.size() < 2) return links;
  for (const engine::NumaNode& memory : nodes) {
    std::vector<uint64_t> words;
    run_on_node(memory, [&] { words.assign(std::max<size_t>(1, bytes / sizeof(uint64_t)), 1); });
    for (const engine::NumaNode& reader : nodes) {
      NumaLink link{.reader = reader.id, .memory = memory.id};
      run_on_node(reader, [&] { link.bytes_per_s = read_bytes_per_s(words); });
      links.push_back(link);
    }
  }
  return links;
}

}  // namespace kindred::cli
