#include "router/stream_watch.h"

#include <algorithm>
#include <cstring>

#include "net/sse_lines.h"

namespace kindred::router {
namespace {

// Keys whose value is what a client waits for, if it is neither empty nor null. Within JSON text quotes are
// escaped, so generated text cannot look like one of them.
constexpr std::array<std::string_view, 8> kTokenKeys = {
    "\"content\":",    "\"text\":",  "\"reasoning_content\":", "\"reasoning\":",
    "\"tool_calls\":", "\"delta\":", "\"partial_json\":",      "\"thinking\":"};

// Whether a key of kTokenKeys with a value that counts begins at `at`.
bool token_at(std::string_view head, size_t at) {
  const std::string_view rest = head.substr(at);
  for (const std::string_view key : kTokenKeys) {
    if (!rest.starts_with(key)) continue;
    std::string_view value = rest.substr(key.size());
    while (value.starts_with(' ')) value.remove_prefix(1);
    if (value.starts_with('"')) return value.size() > 1 && value[1] != '"';
    if (value.starts_with('[')) return value.size() > 1 && value[1] != ']';
    return false;  // null, or an object whose fields come next
  }
  return false;
}

// The value of a line of that field; false if it is another's.
bool field_value(std::string_view line, std::string_view field, std::string_view& value) {
  if (!line.starts_with(field) || (line.size() > field.size() && line[field.size()] != ':')) return false;
  value = line.substr(std::min(field.size() + 1, line.size()));
  if (value.starts_with(' ')) value.remove_prefix(1);
  return true;
}

bool data_value(std::string_view line, std::string_view& value) { return field_value(line, "data", value); }

// The name of an event, or, where a server leaves it out, the `type` of its data.
std::string_view event_name(std::string_view head) {
  std::string_view name;
  for (std::string_view rest = head; !rest.empty();) {
    const size_t end = std::min(rest.find('\n'), rest.size());
    std::string_view value;
    if (field_value(rest.substr(0, end), "event", value)) name = value;
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  if (!name.empty()) return name;
  constexpr std::string_view kType = "\"type\":";
  const size_t at = head.find(kType);
  if (at == std::string_view::npos) return {};
  std::string_view rest = head.substr(at + kType.size());
  while (rest.starts_with(' ')) rest.remove_prefix(1);
  if (!rest.starts_with('"')) return {};
  rest.remove_prefix(1);
  return rest.substr(0, rest.find('"'));
}

}  // namespace

void StreamWatch::feed(std::string_view bytes) {
  net::for_each_line(
      bytes, after_cr_,
      [this](std::string_view piece) {
        add_to_line(piece);
        return true;
      },
      [this] { end_line(); });
}

void StreamWatch::keep(std::string_view bytes) {
  const size_t count = std::min(bytes.size(), kHeadBytes - head_size_);
  std::memcpy(head_.data() + head_size_, bytes.data(), count);
  head_size_ += count;
}

void StreamWatch::add_to_line(std::string_view bytes) {
  if (!inside_line_) {
    comment_ = bytes.front() == ':';
    if (!comment_ && event_begun_) keep("\n");
  }
  inside_line_ = true;
  if (!comment_) keep(bytes);
}

void StreamWatch::end_line() {
  if (inside_line_) {
    if (!comment_) event_begun_ = true;
    inside_line_ = false;
    return;
  }
  if (event_begun_) end_event();
}

void StreamWatch::end_event() {
  event_begun_ = false;
  ++events_;
  std::string_view data;
  const bool done_mark = data_value(head(), data) && data == "[DONE]";
  const std::string_view name = names_events(form_) && !done_mark ? event_name(head()) : std::string_view();
  if ((!names_events(form_) || carries_output(form_, name)) && carries_token()) ++tokens_;
  done_ = done_mark || (names_events(form_) && ends_stream(form_, name));
  head_size_ = 0;
}

bool StreamWatch::carries_token() {
  if (token_at_ < head_size_ && token_at(head(), token_at_)) return true;
  for (size_t at = head().find('"'); at != std::string_view::npos; at = head().find('"', at + 1)) {
    if (!token_at(head(), at)) continue;
    token_at_ = at;
    return true;
  }
  return false;
}

bool StreamWatch::may_end_event() const {
  if (!inside_event()) return true;
  std::string_view rest = head();
  while (!rest.empty()) {
    const size_t end = std::min(rest.find('\n'), rest.size());
    std::string_view value;
    if (data_value(rest.substr(0, end), value)) {
      if (!value.empty()) return value.front() == '{';
      // The first data line is empty, or cut behind its colon.
    }
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  return head_size_ < kHeadBytes;
}

}  // namespace kindred::router
