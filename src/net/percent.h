// Percent-encoding of URLs, taken off.
//
// Thread-safety: a pure function.
#pragma once

#include <string>
#include <string_view>

#include "net/ascii.h"

namespace kindred::net {

// What is no %XX stays as it is.
inline std::string percent_decoded(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '%' && i + 2 < text.size()) {
      const int high = hex_value(text[i + 1]);
      const int low = hex_value(text[i + 2]);
      if (high >= 0 && low >= 0) {
        out += static_cast<char>(high * 16 + low);
        i += 2;
        continue;
      }
    }
    out += text[i];
  }
  return out;
}

}  // namespace kindred::net
