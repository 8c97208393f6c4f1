#include "router/splice.h"

#include <algorithm>
#include <vector>

namespace kindred::router {
namespace {

constexpr std::string_view kSpace = " \t\r\n";

Error broken() { return invalid("not a JSON object whose fields can be found"); }

// Walks the top-level fields of an object. Positions are offsets into the text.
class Fields {
 public:
  explicit Fields(std::string_view text) : text_(text) {}

  struct Field {
    size_t begin = 0, end = 0;  // of `"key" : value`, from the opening quote to the value's last byte
    size_t value_begin = 0;
    std::string_view key;  // between the quotes, as spelled
  };

  // False: it is not an object.
  bool open() {
    skip_space();
    if (at_ >= text_.size() || text_[at_] != '{') return false;
    ++at_;
    skip_space();
    start_ = at_;
    return true;
  }

  // The next field, or none at the object's end or where it is broken; ok() tells which.
  std::optional<Field> next() {
    if (broken_ || done_) return std::nullopt;
    if (at_ < text_.size() && text_[at_] == '}') {
      if (after_comma_) return fail();
      return finish();
    }
    if (seen_ && !after_comma_) return fail();
    Field out{};
    out.begin = at_;
    if (!skip_string()) return fail();
    out.key = text_.substr(out.begin + 1, at_ - out.begin - 2);
    skip_space();
    if (at_ >= text_.size() || text_[at_] != ':') return fail();
    ++at_;
    skip_space();
    out.value_begin = at_;
    if (!skip_value()) return fail();
    out.end = at_;
    skip_space();
    after_comma_ = at_ < text_.size() && text_[at_] == ',';
    if (after_comma_) {
      ++at_;
      skip_space();
    }
    seen_ = true;
    return out;
  }

  bool ok() const { return done_ && !broken_; }
  size_t start() const { return start_; }  // of the first field, or of the closing brace

 private:
  std::optional<Field> fail() {
    broken_ = true;
    return std::nullopt;
  }
  std::optional<Field> finish() {
    ++at_;
    skip_space();
    if (at_ != text_.size()) return fail();
    done_ = true;
    return std::nullopt;
  }

  void skip_space() {
    while (at_ < text_.size() && kSpace.find(text_[at_]) != std::string_view::npos) ++at_;
  }

  bool skip_string() {
    if (at_ >= text_.size() || text_[at_] != '"') return false;
    const size_t begin = ++at_;
    // Long strings are most of a body: memchr finds quotes far faster than a loop over bytes, and what stands
    // before one tells whether it is escaped.
    while (at_ < text_.size()) {
      const size_t quote = text_.find('"', at_);
      if (quote == std::string_view::npos) return false;
      size_t slash = quote;
      while (slash > begin && text_[slash - 1] == '\\') --slash;
      at_ = quote + 1;
      if ((quote - slash) % 2 == 0) return true;
    }
    return false;
  }

  bool skip_value() {
    if (at_ >= text_.size()) return false;
    if (text_[at_] == '"') return skip_string();
    if (text_[at_] != '{' && text_[at_] != '[') {
      const size_t begin = at_;
      at_ = std::min(text_.find_first_of(",}] \t\r\n", at_), text_.size());
      return at_ > begin;
    }
    size_t depth = 0;
    while (at_ < text_.size()) {
      const char c = text_[at_];
      if (c == '"') {
        if (!skip_string()) return false;
        continue;
      }
      ++at_;
      if (c == '{' || c == '[') ++depth;
      else if ((c == '}' || c == ']') && --depth == 0) return true;
    }
    return false;
  }

  std::string_view text_;
  size_t at_ = 0, start_ = 0;
  bool seen_ = false, after_comma_ = false, done_ = false, broken_ = false;
};

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

// Whether a key as spelled is `name`, which is plain ASCII: escapes of other characters cannot be it.
bool spells(std::string_view spelled, std::string_view name) {
  if (spelled.find('\\') == std::string_view::npos) return spelled == name;
  size_t at = 0;
  for (size_t i = 0; i < spelled.size(); ++i) {
    char c = spelled[i];
    if (c == '\\') {
      if (++i >= spelled.size()) return false;
      c = spelled[i];
      if (c == 'u') {
        int code = 0;
        for (int digit = 0; digit < 4; ++digit) {
          if (++i >= spelled.size()) return false;
          const int value = hex_digit(spelled[i]);
          if (value < 0) return false;
          code = code * 16 + value;
        }
        if (code > 0x7f) return false;
        c = static_cast<char>(code);
      } else if (c != '"' && c != '\\' && c != '/') {
        return false;  // a control character, which no name here has
      }
    }
    if (at >= name.size() || name[at] != c) return false;
    ++at;
  }
  return at == name.size();
}

void append_field(std::string& out, const Edit& edit, bool& first) {
  if (!first) out += ',';
  first = false;
  out += '"';
  out += edit.field;
  out += "\":";
  out += *edit.value;
}

}  // namespace

Result<std::string> splice(std::string_view object, std::span<const Edit> edits) {
  Fields fields(object);
  if (!fields.open()) return broken();
  std::string out;
  size_t room = object.size();
  for (const Edit& edit : edits) room += edit.field.size() + edit.value.value_or("").size() + 4;
  out.reserve(room);
  std::vector<bool> met(edits.size(), false);
  bool first = true;  // nothing is in `out` yet
  size_t before_end = fields.start();
  while (const auto field = fields.next()) {
    const auto edit = std::ranges::find_if(edits, [&](const Edit& e) { return spells(field->key, e.field); });
    if (edit != edits.end()) met[static_cast<size_t>(edit - edits.begin())] = true;
    if (edit == edits.end() || edit->value) {
      // What stood before the field goes with it; before the first one kept, that is the opening brace.
      if (first) out.append(object, 0, fields.start());
      else out.append(object, before_end, field->begin - before_end);
      const bool as_is = edit == edits.end();
      out.append(object, field->begin, (as_is ? field->end : field->value_begin) - field->begin);
      if (!as_is) out += *edit->value;
      first = false;
    }
    before_end = field->end;
  }
  if (!fields.ok()) return broken();
  if (first) out.append(object, 0, fields.start());
  for (size_t i = 0; i < edits.size(); ++i) {
    if (!met[i] && edits[i].add && edits[i].value) append_field(out, edits[i], first);
  }
  out.append(object, before_end);
  return out;
}

Result<std::optional<std::string_view>> raw_field(std::string_view object, std::string_view field) {
  Fields fields(object);
  if (!fields.open()) return broken();
  std::optional<std::string_view> out;
  while (const auto at = fields.next()) {
    if (spells(at->key, field)) out = object.substr(at->value_begin, at->end - at->value_begin);
  }
  if (!fields.ok()) return broken();
  return out;
}

}  // namespace kindred::router
