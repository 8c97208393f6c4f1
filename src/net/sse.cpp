#include "net/sse.h"

#include <cstring>
#include <utility>

namespace kindred::net {
namespace {

// Calls `text(piece)` for the bytes of lines and `end()` at each line end of `bytes`. `after_cr`
// carries a CR at the end of one piece to a LF at the start of the next. Stops when `text` returns
// false, and returns that.
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

}  // namespace

size_t SseCounter::feed(std::string_view bytes) {
  size_t events = 0;
  for_each_line(
      bytes, after_cr_,
      [this](std::string_view piece) {
        add_to_line(piece);
        return true;
      },
      [this, &events] { events += end_line(); });
  return events;
}

void SseCounter::add_to_line(std::string_view bytes) {
  if (!inside_line_) comment_ = bytes.front() == ':';
  inside_line_ = true;
}

size_t SseCounter::end_line() {
  if (inside_line_) {
    if (!comment_) event_begun_ = true;
    inside_line_ = false;
    return 0;
  }
  return std::exchange(event_begun_, false) ? 1 : 0;
}

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
