// What a step asks of each rank of expert parallelism, layer by layer, and what of it crosses between engines: counted
// expert by expert under the placement of the moment, and summed up by source for whoever places experts.
//
// A source is an engine; its ranks are place::ranks_of_source(). With tensor parallelism an engine's tokens are on all
// its ranks, so only what goes to another engine's ranks crosses a link; each of the engine's ranks sends its share.
//
// Unit: copies, (token, expert) pairs. Of a chunk of a prompt only the whole prompt's counts are known; an expert gets
// its share of them, and is used from ln 2 expected copies on, as in sim/expert_union.h.
// Thread-safety: none; belongs to one worker.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "place/problem.h"
#include "sim/tape.h"

namespace kindred::sim {

class RankFlow {
 public:
  RankFlow(uint32_t layers, uint32_t experts, uint32_t sources, uint32_t ranks);

  // [L, E] of ranks; copies of experts are not modelled. Linear until the first call.
  void place(std::span<const uint32_t> rank_of);

  // A step: begin(), its tokens, count().
  void begin();
  void add_token(uint32_t source, std::span<const uint64_t> row);
  void add_chunk(uint32_t source, const expert::ExpertCounts& prompt, uint32_t tokens);
  void count();

  // Of the last count(), each valid until the next one:
  std::span<const float> copies() const { return copies_; }         // [L, ranks]
  std::span<const uint32_t> distinct() const { return distinct_; }  // [L, ranks]
  // [L]: the most that one rank's link has to carry, sent or received.
  std::span<const float> link_copies() const { return link_; }
  double all_copies() const { return all_; }
  double remote_copies() const { return remote_; }
  double busiest_copies() const { return busiest_; }        // of the rank with the most, summed over layers
  double rank_copies(uint32_t first, uint32_t last) const;  // of ranks in [first, last), all layers

  // Since the last call.
  place::Traffic take_window();

 private:
  uint32_t layers_, experts_, sources_, ranks_;
  std::vector<uint32_t> rank_of_;           // [L, E]
  std::vector<uint32_t> owner_of_;          // [ranks]: source
  std::vector<uint32_t> own_ranks_;         // [S]: how many
  std::vector<std::vector<float>> counts_;  // [S][L, E]
  std::vector<double> window_;              // [L, S, E]
  std::vector<float> copies_, link_;
  std::vector<uint32_t> distinct_;
  std::vector<float> sent_, received_;  // scratch
  double all_ = 0, remote_ = 0, busiest_ = 0;
};

}  // namespace kindred::sim
