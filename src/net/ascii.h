// Small pieces of HTTP's grammar (RFC 9110 §5.6) that several files of this module need.
#pragma once

#include <cstdint>
#include <cstring>
#include <string_view>

namespace kindred::net {

// The value of a hex digit, or -1.
constexpr int hex_value(char byte) {
  if (byte >= '0' && byte <= '9') return byte - '0';
  if (byte >= 'a' && byte <= 'f') return byte - 'a' + 10;
  if (byte >= 'A' && byte <= 'F') return byte - 'A' + 10;
  return -1;
}

// Without optional white space (space, tab) at both ends.
constexpr std::string_view trim(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.remove_suffix(1);
  return text;
}

// Whether a byte below 0x20 or 0x7f is among them, HTAB included. Eight bytes at a time: every header passes here
// more than once.
inline bool has_control(std::string_view text) {
  constexpr uint64_t kOnes = 0x0101010101010101, kHigh = 0x8080808080808080;
  size_t at = 0;
  for (; at + 8 <= text.size(); at += 8) {
    uint64_t word = 0;
    std::memcpy(&word, text.data() + at, 8);
    const uint64_t del = word ^ (kOnes * 0x7f);
    const uint64_t below = (word - kOnes * 0x20) & ~word;
    // A borrow can only come from a byte that is itself below, so the word as a whole is judged rightly.
    if (((below | ((del - kOnes) & ~del)) & kHigh) != 0) return true;
  }
  for (; at < text.size(); ++at) {
    if (static_cast<unsigned char>(text[at]) < 0x20 || text[at] == 0x7f) return true;
  }
  return false;
}

}  // namespace kindred::net
