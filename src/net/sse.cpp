#include "net/sse.h"

#include <algorithm>
#include <utility>

#include "net/sse_lines.h"

namespace kindred::net {

bool SseSplitter::feed(std::string_view bytes) {
  if (failed_) return false;
  failed_ = !for_each_line(
      bytes, after_cr_, [this](std::string_view piece) { return add_to_line(piece); }, [this] { end_line(); });
  return !failed_;
}

bool SseSplitter::add_to_line(std::string_view bytes) {
  if (bytes.size() > limit_bytes_ - std::min(limit_bytes_, line_.size() + data_.size())) return false;
  line_ += bytes;
  return true;
}

void SseSplitter::end_line() {
  if (line_.empty()) {
    if (has_data_) {
      data_.pop_back();  // the LF behind the last line
      ready_.push_back(std::move(data_));
    }
    data_.clear();
    has_data_ = false;
    return;
  }
  std::string_view value = line_;
  if (value.starts_with("data") && (value.size() == 4 || value[4] == ':')) {
    value.remove_prefix(std::min<size_t>(5, value.size()));
    if (value.starts_with(' ')) value.remove_prefix(1);
    data_ += value;
    data_ += '\n';
    has_data_ = true;
  }
  line_.clear();
}

std::optional<std::string> SseSplitter::next() {
  if (ready_.empty()) return std::nullopt;
  std::optional<std::string> data = std::move(ready_.front());
  ready_.pop_front();
  return data;
}

}  // namespace kindred::net
