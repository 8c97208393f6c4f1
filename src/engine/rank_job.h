// One layer's expert FFN, or a part of it, on all ranks that own one of its experts.
//
// llama.cpp's graph has a tensor [n, k, tokens] for each operation, k experts a token. A rank makes the same
// graph over [n, 1, pairs], where a pair is a (slot, token) whose expert it owns, with its own copies of the
// weights, and writes the results of its pairs to their places. Each row goes through the same kernel as in the
// CPU backend, so it has the same bits.
//
// The job owns all it reads but the weights: inputs are copied first, since ggml may have given their memory to
// the results, and an abandoned job must not touch the context's memory.
//
// Thread-safety: prepare() on one thread, then as RankJob.
#pragma once

#include <ggml.h>

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/expert_ranks.h"
#include "engine/llama_backend.h"

namespace kindred::engine {

// Operations of one layer that are computed together, in order, views of their results among them.
struct RankGroup {
  const ggml_tensor* ids = nullptr;  // I32 [k, tokens]: the experts
  uint32_t layer = 0;                // row of the placement
  bool has_down = false;
  std::vector<ggml_tensor*> nodes;
  std::vector<bool> written;  // whether somebody outside reads the node's result
};

class RankFfnJob final : public RankJob {
 public:
  explicit RankFfnJob(ExpertRanks& ranks);
  ~RankFfnJob() override;

  // Takes what the ranks will need. Error: kInternal (an expert id out of range).
  Status prepare(const RankGroup& group, const ExpertOwners::Reading& owners);
  size_t pairs(uint32_t rank) const { return slots_[rank].pairs.size(); }

  bool takes_part(uint32_t rank) const override { return !slots_[rank].pairs.empty(); }
  bool compute(uint32_t rank) override;
  void deliver(uint32_t rank) override;

 private:
  struct Pair {
    uint32_t slot, token;
  };
  // Where an operation's source comes from.
  struct Source {
    enum class Kind { kNone, kWeights, kConstant, kIds, kInput, kOperation } kind = Kind::kNone;
    size_t index = 0;
  };
  struct Operation {
    ggml_tensor like;  // llama.cpp's tensor, as it was
    std::array<Source, GGML_MAX_SRC> sources;
    bool written = false;
  };
  struct Input {
    int64_t row_bytes = 0, rows = 0;  // rows a token: 1 or k
    int64_t columns = 0;
    std::vector<std::byte> data;  // [tokens][rows][row_bytes]
  };
  // A rank's memory, touched by its own thread only while it computes.
  struct Slot {
    std::vector<Pair> pairs;
    std::vector<int32_t> experts;  // of the pairs
    std::vector<std::byte> meta, data, work;
    size_t used = 0;  // of data
    ggml_tensor* ids = nullptr;
    std::vector<ggml_tensor*> inputs, results;  // by input, by operation
    ComputePool pool;
  };

  Source source_of(const RankGroup& group, const ggml_tensor& node, size_t index);
  size_t take_input(const ggml_tensor& tensor);
  ggml_tensor* build(ggml_context* context, Slot& slot, uint32_t rank, const Operation& operation);
  ggml_tensor* gather(ggml_context* context, Slot& slot, const Input& input);
  size_t bytes_needed(size_t pairs) const;

  ExpertRanks& ranks_;
  int64_t tokens_ = 0;
  std::vector<Operation> operations_;
  std::vector<Input> inputs_;
  std::vector<const ggml_tensor*> input_tensors_;  // while preparing
  std::vector<ggml_tensor> constants_, weights_;
  std::vector<Slot> slots_;
};

}  // namespace kindred::engine
