// The lines of a stream of server-sent events that arrives in arbitrary pieces.
//
// Thread-safety: pure function.
#pragma once

#include <cstring>
#include <string_view>

namespace kindred::net {

// Calls `text(piece)` for the bytes of lines and `end()` at each line end of `bytes`; LF, CR LF and CR
// end lines. `after_cr` carries a CR at the end of one piece to a LF at the start of the next. Stops when
// `text` returns false, and returns that.
template <class Text, class End>
bool for_each_line(std::string_view bytes, bool& after_cr, Text&& text, End&& end) {
  if (after_cr && !bytes.empty()) {
    if (bytes.front() == '\n') bytes.remove_prefix(1);
    after_cr = false;
  }
  while (!bytes.empty()) {
    // memchr beats a byte loop here, and this runs on every byte relayed.
    const auto* lf = static_cast<const char*>(std::memchr(bytes.data(), '\n', bytes.size()));
    const size_t until_lf = lf == nullptr ? bytes.size() : static_cast<size_t>(lf - bytes.data());
    const auto* cr = static_cast<const char*>(std::memchr(bytes.data(), '\r', until_lf));
    const size_t size = cr == nullptr ? until_lf : static_cast<size_t>(cr - bytes.data());
    if (size > 0 && !text(bytes.substr(0, size))) return false;
    if (size == bytes.size()) return true;
    end();
    size_t used = size + 1;
    if (cr != nullptr) {
      if (used == bytes.size()) {
        after_cr = true;
      } else if (bytes[used] == '\n') {
        ++used;
      }
    }
    bytes.remove_prefix(used);
  }
  return true;
}

}  // namespace kindred::net
