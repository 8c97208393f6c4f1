// What is known of a request's prompt and of who holds it (router/prefixes.h).
//
// Thread-safety: plain values and pure functions.
#pragma once

#include <string_view>
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

// Of a prompt, by which two prompts are known to begin alike.
inline constexpr size_t kPieceBytes = 256;

// One hash per whole piece of `prompt`, at most `most`, each of all that is before it, too, and of `of` (a model's
// name): equal only where all of that is. 64 bits, not keyed: who wants to may find two prompts with one hash, and
// gains that they are routed alike.
std::vector<fleet::BlockHash> prompt_pieces(std::string_view of, std::string_view prompt, size_t most = SIZE_MAX);

}  // namespace kindred::router
