// What fuzz targets share: an input that is cut into pieces by its own first bytes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace kindred::fuzz {

// Reads numbers off the front of the input.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : rest_(reinterpret_cast<const char*>(data), size) {}

  uint8_t byte() {
    if (rest_.empty()) return 0;
    const auto value = static_cast<uint8_t>(rest_.front());
    rest_.remove_prefix(1);
    return value;
  }
  std::string_view rest() const { return rest_; }

 private:
  std::string_view rest_;
};

// `text` in pieces of 1 to `step` bytes, `step` 0: in one.
inline std::vector<std::string_view> pieces(std::string_view text, uint8_t step) {
  std::vector<std::string_view> out;
  if (step == 0) return {text};
  for (size_t size = 1; !text.empty(); size = size % step + 1) {
    out.push_back(text.substr(0, std::min(size, text.size())));
    text.remove_prefix(out.back().size());
  }
  return out;
}

}  // namespace kindred::fuzz
