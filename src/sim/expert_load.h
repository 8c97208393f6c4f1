// How much work the experts of each rank got lately: what an engine reports as its expert pressure, and what of its
// tokens' copies leaves the engine's own ranks.
//
// Unit: token equivalents. A token has a weight of 1, divided among ranks as its top_k experts of all layers are. Of
// a prompt that is what the whole prompt used; of generated tokens the mean of kSampledTokens rows of their tape, since
// counting each row of each step would cost more than the step itself.
//
// "Lately" is the last second or so: a window that slides in steps of a second, the one before counted in proportion.
//
// Thread-safety: none; belongs to one worker. Experts are known by address and must live as long as this does.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "sim/expert_union.h"
#include "sim/tape.h"

namespace kindred::sim {

inline constexpr uint32_t kSampledTokens = 16;

class ExpertLoad {
 public:
  explicit ExpertLoad(std::shared_ptr<const ExpertRanks> ranks);

  // Tokens of one sequence, computed in the step that began at `now_ns`; times never go back.
  void add(const RequestExperts& experts, uint32_t prompt_tokens, uint32_t generated_tokens, int64_t now_ns);
  // What each rank got in the step that began at `now_ns`, where it is known: [ranks], token equivalents.
  void add_ranks(std::span<const double> tokens, int64_t now_ns);
  // Of one rank, or of all in [first, last).
  double recent_tokens(uint32_t first, uint32_t last, int64_t now_ns);
  // Of `experts`' tokens, the part that goes to ranks in [first, last).
  double prompt_share(const RequestExperts& experts, uint32_t first, uint32_t last);
  double generated_share(const RequestExperts& experts, uint32_t first, uint32_t last);

 private:
  using Shares = std::vector<double>;  // [ranks], sum 1

  void move_to(int64_t now_ns);
  const Shares& of_prompt(const expert::ExpertCounts& counts);
  const Shares& of_tape(const ExpertTape& tape);

  std::shared_ptr<const ExpertRanks> ranks_;
  std::unordered_map<const void*, Shares> known_;
  int64_t window_ = 0;   // its number: the second it stands for
  Shares now_, before_;  // tokens, [ranks]
};

}  // namespace kindred::sim
