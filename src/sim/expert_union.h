// The distinct experts of one step, as an OR of masks; and, with expert parallelism, how many of them the rank
// with the most has to read, layer by layer.
//
// Thread-safety: ExpertRanks is immutable; an ExpertUnion belongs to one worker.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/result.h"
#include "expert/counts.h"
#include "sim/tape.h"

namespace kindred::sim {

// Where each expert sits.
class ExpertRanks {
 public:
  // Expert e sits on rank e * ranks / E of every layer.
  static ExpertRanks linear(uint32_t layers, uint32_t experts, uint32_t ranks);
  // `placement` [L, E] of ranks. Error: kInvalid: a wrong size, or a rank beyond `ranks`.
  static Result<ExpertRanks> make(uint32_t layers, uint32_t experts, uint32_t ranks,
                                  std::span<const uint32_t> placement);

  uint32_t ranks() const { return ranks_; }
  uint32_t layers() const { return layers_; }
  uint32_t words() const { return words_; }
  uint32_t rank_of(uint32_t layer, uint32_t expert) const;
  std::span<const uint64_t> mask(uint32_t rank) const {  // [L, words]
    const size_t row = static_cast<size_t>(layers_) * words_;
    return {masks_.data() + rank * row, row};
  }

 private:
  ExpertRanks(uint32_t layers, uint32_t experts, uint32_t ranks)
      : layers_(layers),
        words_((experts + 63) / 64),
        ranks_(ranks),
        masks_(static_cast<size_t>(ranks) * layers * words_, 0) {}

  uint32_t layers_, words_, ranks_;
  std::vector<uint64_t> masks_;  // [ranks, L, words]
};

class ExpertUnion {
 public:
  explicit ExpertUnion(std::shared_ptr<const ExpertRanks> ranks);

  void clear();
  void add(std::span<const uint64_t> token);  // [L, words]; borrowed until count()
  // A chunk of `chunk_tokens` of a prompt. Which experts exactly is not known, only how often the whole prompt used
  // each: those count whose expected uses are ln 2 or more, as they are used by the chunk more likely than not.
  void add_chunk(const expert::ExpertCounts& prompt, uint64_t chunk_tokens);

  // [L], valid until the next call: of the rank with the most.
  std::span<const uint32_t> count();
  uint64_t distinct() const { return distinct_; }  // over all layers and ranks, of the last count()

 private:
  void merge();

  std::shared_ptr<const ExpertRanks> ranks_;
  std::vector<uint64_t> bits_;           // [L, words]
  std::vector<const uint64_t*> tokens_;  // added, and not in bits_ yet
  std::vector<uint32_t> counts_;         // [L]
  uint64_t distinct_ = 0;
};

}  // namespace kindred::sim
