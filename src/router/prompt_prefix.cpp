#include "router/prompt_prefix.h"

#include <xxhash.h>

#include <algorithm>

namespace kindred::router {

std::vector<fleet::BlockHash> prompt_pieces(std::string_view of, std::string_view prompt, size_t most) {
  std::vector<fleet::BlockHash> out;
  out.reserve(std::min(most, prompt.size() / kPieceBytes));
  fleet::BlockHash hash = XXH3_64bits(of.data(), of.size());
  for (size_t at = 0; at + kPieceBytes <= prompt.size() && out.size() < most; at += kPieceBytes) {
    hash = XXH3_64bits_withSeed(prompt.data() + at, kPieceBytes, hash);
    out.push_back(hash);
  }
  return out;
}

}  // namespace kindred::router
