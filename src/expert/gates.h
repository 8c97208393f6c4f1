// Gate sums: for each MoE layer and expert, the router's probability summed over a prompt's tokens. It is
// the continuous counterpart of expert counts, for ELDR's transforms gate probability and gate
// probability x idf (ELDR figure 14: "the continuous softmax gate"): *all* experts' probabilities as the
// gate gives them, before top-k selection and before the selected ones are renormalised. With a softmax
// gate each row sums to the prompt's tokens; gates with independent scores (sigmoid) have no such sum.
//
// Thread-safety: plain values and pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace kindred::expert {

struct ExpertGates {
  std::vector<uint32_t> layers;  // model layer index of each row, ascending
  uint32_t experts = 0;          // E, routed experts a layer
  std::vector<float> data;       // [L, E] row-major, finite, >= 0

  bool operator==(const ExpertGates&) const = default;
};

// {"v":1,"dtype":"f32","layers":[…],"experts":E,"data":"<base64, row-major little-endian>"}
std::string gates_to_json(const ExpertGates& gates);

// Untrusted input: sizes are checked against each other and against `limit_cells` before anything is
// allocated. Unknown fields are ignored. Errors: kInvalid, naming the field (version, dtype, wrong size, a
// value that is negative or not finite); kTooLarge.
Result<ExpertGates> gates_from_json(std::string_view json, size_t limit_cells = 1U << 20);

}  // namespace kindred::expert
