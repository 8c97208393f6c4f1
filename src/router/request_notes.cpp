#include "router/request_notes.h"

#include <algorithm>
#include <charconv>

namespace kindred::router {
namespace {

constexpr std::string_view kUsageKey = "\"usage\"";
constexpr size_t kUsageBytes = 2048;  // with the details that some engines put into it

void skip_space(std::string_view& text) {
  text.remove_prefix(std::min(text.find_first_not_of(" \t\r\n"), text.size()));
}

bool take_char(std::string_view& text, char wanted) {
  skip_space(text);
  if (!text.starts_with(wanted)) return false;
  text.remove_prefix(1);
  return true;
}

// The number behind `name` in an object's text.
std::optional<uint64_t> number_after(std::string_view object, std::string_view name) {
  const size_t at = object.find(name);
  if (at == std::string_view::npos) return std::nullopt;
  std::string_view rest = object.substr(at + name.size());
  if (!take_char(rest, ':')) return std::nullopt;
  skip_space(rest);
  uint64_t number = 0;
  const auto [end, fault] = std::from_chars(rest.data(), rest.data() + rest.size(), number);
  if (fault != std::errc{}) return std::nullopt;
  return number;
}

}  // namespace

TokenUsage usage_in(std::string_view text) {
  TokenUsage out;
  size_t at = text.rfind(kUsageKey);
  while (at != std::string_view::npos) {
    std::string_view rest = text.substr(at + kUsageKey.size());
    if (take_char(rest, ':') && take_char(rest, '{')) {
      rest = rest.substr(0, kUsageBytes);
      out.prompt_tokens = number_after(rest, "\"prompt_tokens\"");
      if (!out.prompt_tokens) out.prompt_tokens = number_after(rest, "\"input_tokens\"");
      out.output_tokens = number_after(rest, "\"completion_tokens\"");
      if (!out.output_tokens) out.output_tokens = number_after(rest, "\"output_tokens\"");
      return out;
    }
    // `"usage":null` on the events before the last, as OpenAI sends it.
    at = at == 0 ? std::string_view::npos : text.rfind(kUsageKey, at - 1);
  }
  return out;
}

namespace {

// Of a short stream the beginning is the end, too.
TokenUsage first_usage_in(std::string_view text) {
  const size_t first = text.find(kUsageKey);
  if (first == std::string_view::npos) return {};
  return usage_in(text.substr(0, text.find(kUsageKey, first + 1)));
}

}  // namespace

void StreamTail::feed(std::string_view bytes) {
  if (bytes.size() >= kKeptBytes) {
    kept_ = bytes.substr(bytes.size() - kKeptBytes);
    return;
  }
  if (kept_.size() + bytes.size() > 2 * kKeptBytes) kept_.erase(0, kept_.size() - kKeptBytes);
  kept_ += bytes;
}

TokenUsage RequestNotes::best_usage() const {
  TokenUsage out = usage;
  const TokenUsage told = usage_in(tail.bytes());
  if (told.prompt_tokens) out.prompt_tokens = told.prompt_tokens;
  if (told.output_tokens) out.output_tokens = told.output_tokens;
  if (!out.prompt_tokens) out.prompt_tokens = first_usage_in(head.bytes()).prompt_tokens;
  if (!out.output_tokens && events > 0) out.output_tokens = events;
  return out;
}

}  // namespace kindred::router
