#include "router/expert_fields.h"

#include <simdjson.h>

#include <array>
#include <optional>
#include <string_view>

namespace kindred::router {
namespace {

namespace ondemand = simdjson::ondemand;

constexpr std::array<std::string_view, 3> kFields = {"expert_counts", "decode_expert_counts", "expert_gates"};
constexpr int kMostFields = 8;  // a field given more often is no engine's

struct Cut {
  size_t begin = 0, end = 0;
};

bool is_counts(std::string_view key) {
  for (const std::string_view field : kFields) {
    if (key == field) return true;
  }
  return false;
}

// Underscores are rarer than the letters that a search for the whole word would stop at.
bool may_have_fields(std::string_view answer) {
  for (size_t at = answer.find('_'); at != std::string_view::npos; at = answer.find('_', at + 1)) {
    if (answer.substr(0, at).ends_with("expert")) return true;
  }
  return false;
}

// The end of a value, or nullptr if it is malformed.
const char* end_of(ondemand::value value) {
  ondemand::json_type type{};
  std::string_view raw;
  if (value.type().get(type) != simdjson::SUCCESS) return nullptr;
  if (type == ondemand::json_type::object) {
    ondemand::object object;
    if (value.get_object().get(object) || object.raw_json().get(raw)) return nullptr;
  } else if (type == ondemand::json_type::array) {
    ondemand::array array;
    if (value.get_array().get(array) || array.raw_json().get(raw)) return nullptr;
  } else {
    raw = value.raw_json_token();
  }
  raw = raw.substr(0, raw.find_last_not_of(" \t\r\n") + 1);  // some versions give what follows, too
  return raw.data() + raw.size();
}

// Of the first such field, from its key to the end of its value.
std::optional<Cut> find_counts(ondemand::parser& parser, const std::string& answer) {
  const simdjson::padded_string_view padded(answer.data(), answer.size(), answer.capacity());
  ondemand::document document;
  ondemand::object object;
  if (parser.iterate(padded).get(document) || document.get_object().get(object)) return std::nullopt;
  for (auto field : object) {
    ondemand::raw_json_string raw_key;
    std::string_view key;
    ondemand::value value;
    if (field.key().get(raw_key) || field.unescaped_key().get(key) || field.value().get(value)) return std::nullopt;
    if (!is_counts(key)) continue;
    const char* end = end_of(value);
    if (end == nullptr) return std::nullopt;
    return Cut{static_cast<size_t>(raw_key.raw() - 1 - answer.data()), static_cast<size_t>(end - answer.data())};
  }
  return std::nullopt;
}

// With the comma that would be one too many.
Cut with_comma(std::string_view json, Cut field) {
  constexpr std::string_view kSpace = " \t\r\n";
  const size_t before = json.substr(0, field.begin).find_last_not_of(kSpace);
  if (before != std::string_view::npos && json[before] == ',') return {before, field.end};
  const size_t after = json.find_first_not_of(kSpace, field.end);
  if (after != std::string_view::npos && json[after] == ',') return {field.begin, after + 1};
  return field;
}

}  // namespace

void remove_expert_counts(std::string& answer) {
  // Nearly no answer has them.
  if (!may_have_fields(answer)) return;
  answer.reserve(answer.size() + simdjson::SIMDJSON_PADDING);
  ondemand::parser parser;
  for (int i = 0; i < kMostFields; ++i) {
    const std::optional<Cut> found = find_counts(parser, answer);
    if (!found) return;
    const Cut cut = with_comma(answer, *found);
    answer.erase(cut.begin, cut.end - cut.begin);
  }
}

}  // namespace kindred::router
