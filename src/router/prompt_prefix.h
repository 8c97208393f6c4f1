// What is known of a request's prompt and of who holds it (router/prefixes.h).
//
// Thread-safety: plain values.
#pragma once

#include <utility>
#include <vector>

#include "fleet/fleet.h"
#include "fleet/prefix_index.h"

namespace kindred::router {

struct PromptPrefix {
  double prompt_tokens = 0;  // exact, or estimated from the bytes; 0: no prompt, or nobody asked
  bool exact = false;
  std::vector<std::pair<fleet::WorkerId, double>> held_tokens;
  std::vector<fleet::BlockHash> pieces;
};

}  // namespace kindred::router
