// What the ranks' ggml backend does with its part of llama.cpp's graph: finds the operations of each layer,
// counts its experts, and has it computed (rank_job.h). With one rank the graph is computed as it is.
//
// Thread-safety: one per llama_context, used by the thread that evaluates it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/expert_ranks.h"
#include "engine/rank_job.h"

struct ggml_cgraph;

namespace kindred::engine {

class RankCompute {
 public:
  RankCompute() = default;
  ~RankCompute();
  RankCompute(const RankCompute&) = delete;
  RankCompute& operator=(const RankCompute&) = delete;

  void set_threads(uint32_t threads);  // where there is one rank
  // Errors: kTimeout, kInternal; kExhausted (more contexts than there can be sources).
  Status compute(ggml_cgraph& graph);

 private:
  Status find_ranks(const ggml_cgraph& graph);
  Status compute_as_is(ggml_cgraph& graph);
  Status run(const RankGroup& group);
  // `owners`: null with one rank, which has them all.
  void count(const ggml_tensor& ids, uint32_t layer, const ExpertOwners::Reading* owners);

  ExpertRanks* ranks_ = nullptr;  // of the context's model, known at the first graph
  RankCounts::Source* source_ = nullptr;
  uint32_t threads_ = 1;
  std::shared_ptr<RankFfnJob> job_;    // kept for its memory
  ComputePool pool_;                   // of graphs computed as they are, made when there is one
  std::vector<uint8_t> work_;          // and their memory
  std::vector<bool> active_;           // by expert, while counting
  std::vector<uint32_t> rank_active_;  // by rank
};

}  // namespace kindred::engine
