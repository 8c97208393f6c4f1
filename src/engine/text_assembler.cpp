#include "engine/text_assembler.h"

#include <algorithm>
#include <utility>

#include "base/bytes.h"

namespace kindred::engine {
namespace {

// The length of the longest end of `text` that a stop string begins with.
size_t possible_stop(std::string_view text, const std::vector<std::string>& stops) {
  size_t longest = 0;
  for (const std::string_view stop : stops) {
    for (size_t size = std::min(text.size(), stop.size() - 1); size > longest; --size) {
      if (text.ends_with(stop.substr(0, size))) longest = size;
    }
  }
  return longest;
}

}  // namespace

TextAssembler::Step TextAssembler::append(std::string_view bytes) {
  held_ += bytes;
  size_t stop_at = std::string::npos;
  for (const std::string& stop : stops_) stop_at = std::min(stop_at, held_.find(stop));
  if (stop_at != std::string::npos) {
    Step step{held_.substr(0, stop_at), true};
    held_.clear();
    return step;
  }
  const size_t free = held_.size() - possible_stop(held_, stops_);
  const size_t ready = utf8_complete_prefix(std::string_view(held_).substr(0, free));
  Step step{held_.substr(0, ready), false};
  held_.erase(0, ready);
  return step;
}

std::string TextAssembler::finish() { return std::exchange(held_, {}); }

}  // namespace kindred::engine
