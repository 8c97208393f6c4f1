// Which rank holds each expert of each MoE layer, and its file:
//   {"layers":L,"experts":E,"ranks":R,"placement":[[rank of expert 0, rank of expert 1, …], …]}
// with one row per MoE layer of the model, in order, the last one included.
//
// Thread-safety: plain values, pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace kindred::engine {

struct ExpertPlacement {
  uint32_t layers = 0, experts = 0, ranks = 0;
  std::vector<uint16_t> rank_of;  // [layers][experts]

  uint16_t at(uint32_t layer, uint32_t expert) const { return rank_of[size_t{layer} * experts + expert]; }
  bool operator==(const ExpertPlacement&) const = default;
};

// Experts in order, as many at each rank as can be: where `experts` is not a multiple of `ranks`, some ranks
// hold one more.
ExpertPlacement linear_placement(uint32_t layers, uint32_t experts, uint32_t ranks);

// Error: kInvalid, with the field and what is accepted. `layers`, `experts`, `ranks`: what the text must be for.
Result<ExpertPlacement> parse_expert_placement(std::string_view text, uint32_t layers, uint32_t experts,
                                               uint32_t ranks);
Result<ExpertPlacement> load_expert_placement(const std::string& path, uint32_t layers, uint32_t experts,
                                              uint32_t ranks);

}  // namespace kindred::engine
