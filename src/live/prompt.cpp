#include "live/prompt.h"

#include <array>

#include "base/rng.h"

namespace kindred::live {
namespace {

constexpr uint32_t kRoleMark = 1U << 31;  // tokens of text have this bit clear
constexpr auto kWords = std::to_array<std::string_view>(
    {"the",  "of",    "river", "stone",  "light", "carries", "many", "small", "boats",   "toward", "a",
     "city", "where", "old",   "clocks", "turn",  "slowly",  "and",  "every", "morning", "people", "ask",
     "what", "time",  "it",    "is",     "now",   "while",   "rain", "falls", "softly",  "again"});

}  // namespace

void append_tokens(std::string_view text, std::vector<uint32_t>& out) {
  for (size_t at = 0; at < text.size(); at += kTokenBytes) {
    uint32_t token = 0;
    for (const char c : text.substr(at, kTokenBytes)) token = token << 8 | static_cast<uint8_t>(c);
    out.push_back(token & (kRoleMark - 1));
  }
}

void append_role(std::string_view role, std::vector<uint32_t>& out) {
  uint64_t hash = role.size();
  for (const char c : role) hash = mix64(hash ^ static_cast<uint8_t>(c));
  out.push_back(kRoleMark | static_cast<uint32_t>(hash & (kRoleMark - 1)));
}

uint64_t prompt_hash(std::span<const uint32_t> tokens) {
  uint64_t hash = tokens.size();
  for (const uint32_t token : tokens) hash = mix64(hash ^ token);
  return hash;
}

std::vector<uint64_t> piece_hashes(std::span<const uint32_t> tokens, uint32_t piece_tokens) {
  std::vector<uint64_t> out;
  uint64_t hash = piece_tokens;
  for (size_t at = 0; at + piece_tokens <= tokens.size(); at += piece_tokens) {
    for (const uint32_t token : tokens.subspan(at, piece_tokens)) hash = mix64(hash ^ token);
    out.push_back(hash);
  }
  return out;
}

std::string answer_word(uint64_t prompt, uint32_t position) {
  const uint64_t which = mix64(prompt ^ mix64(position)) % kWords.size();
  return std::string(position == 0 ? "" : " ").append(kWords.at(which));
}

}  // namespace kindred::live
