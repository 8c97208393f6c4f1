// Placements in files (design, section 5), and in the forms that vLLM and SGLang load.
//
//   ours    {"layers": L, "experts": E, "ranks": R, "placement": [[rank or [ranks], ...], ...]}
//   vLLM    [[expert in each slot], ...]: a physical-to-logical map per layer; a rank's slots follow each other
//   SGLang  {"physical_to_logical_map": that}, for --init-expert-location, which takes no other field
//
// Thread-safety: pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/result.h"
#include "place/problem.h"

namespace kindred::place {

Json placement_json(const Placement& placement);
std::string placement_to_text(const Placement& placement);  // a line per layer
// Error: kInvalid: not of this form, or an expert without a rank, or a rank that is not there.
Result<Placement> placement_from_text(std::string_view text);
Result<Placement> load_placement(const std::string& path);

// [L][E] of ranks or lists of ranks. `ranks` 0: one more than the highest. Error: kInvalid.
Result<Placement> placement_from_lists(const Json& lists, uint32_t experts, uint32_t ranks);

// [L][P]: the expert in each slot. An expert that stays on its rank keeps its slot of `old`, if given; [L][P] too.
std::vector<std::vector<uint32_t>> slots_of(const Placement& placement,
                                            const std::vector<std::vector<uint32_t>>& old = {});
// The reverse. Error: kInvalid: slots do not divide among ranks, or an expert is missing.
Result<Placement> placement_from_slots(const std::vector<std::vector<uint32_t>>& slots, uint32_t experts,
                                       uint32_t ranks);

std::string vllm_map(const std::vector<std::vector<uint32_t>>& slots);
std::string sglang_location(const std::vector<std::vector<uint32_t>>& slots);

}  // namespace kindred::place
