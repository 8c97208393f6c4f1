// What the gates of the synthetic process (sim/expert_process.h) say of a prompt, beside what they choose: the
// transform "gate probability" needs it.
//
// A token that chooses experts one after the other, each time in proportion to exp(utility) among those left, is one
// that takes the top_k of the logits utility + Gumbel noise. Its gate's probabilities are taken to be the softmax of
// these logits, drawn given what it has chosen: so they know no more of a request than a real gate's, and agree with
// the counts. For the eight tokens between two checkpoints of a tape their mean stands.
//
// Thread-safety: none, as of the process.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/result.h"
#include "sim/expert_process.h"

namespace kindred::sim {

class SyntheticGates {
 public:
  virtual ~SyntheticGates() = default;
  // [L * E]: probabilities of all experts, summed over the prompt's tokens, of the request that the process with the
  // same options gives for these arguments. Each layer sums to request.prompt_tokens, but for rounding.
  virtual std::vector<float> prompt_gates(const TraceRequest& request, uint64_t number) = 0;
};

// Memory: 4 bytes x L x E x tape_tokens / 8 for each prototype asked for. Error: as make_synthetic.
Result<std::unique_ptr<SyntheticGates>> make_synthetic_gates(SyntheticOptions options);

}  // namespace kindred::sim
