#include "engine/openai_json.h"

#include <fmt/format.h>

#include <cmath>

#include "base/bytes.h"

namespace kindred::engine {

namespace dom = simdjson::dom;

std::string shown(dom::element value) {
  constexpr size_t kShownBytes = 60;
  std::string text;
  switch (value.type()) {
    // Not the contents: they may be as long as the body.
    case dom::element_type::ARRAY: return "a list";
    case dom::element_type::OBJECT: return "an object";
    case dom::element_type::STRING: {
      std::string_view string;
      if (value.get(string) != simdjson::SUCCESS) return "a string";
      const bool cut = string.size() > kShownBytes;
      string = string.substr(0, kShownBytes);
      return json_string(string.substr(0, utf8_complete_prefix(string))) + (cut ? "…" : "");
    }
    default: text = simdjson::minify(value); break;
  }
  return text.size() > kShownBytes ? text.substr(0, kShownBytes) + "…" : text;
}

std::optional<dom::element> FieldReader::any(std::string_view name) const {
  dom::element value;
  if (object_.at_key(name).get(value) != simdjson::SUCCESS || value.is_null()) return std::nullopt;
  return value;
}

void FieldReader::fail(std::string_view name, std::string message) {
  if (status_.ok()) status_ = invalid(std::move(message), path_ + std::string(name));
}

void FieldReader::fail_type(std::string_view name, dom::element got, std::string_view accepted) {
  fail(name, fmt::format("{}{}: got {}, accepted: {}", path_, name, shown(got), accepted));
}

void FieldReader::adopt(Status status) {
  if (status_.ok()) status_ = std::move(status);
}

std::optional<bool> FieldReader::boolean(std::string_view name) {
  const auto value = any(name);
  if (!value) return std::nullopt;
  bool out = false;
  if (value->get(out) == simdjson::SUCCESS) return out;
  fail_type(name, *value, "true or false");
  return std::nullopt;
}

std::optional<int64_t> FieldReader::integer(std::string_view name, int64_t least, int64_t most) {
  const auto value = any(name);
  if (!value) return std::nullopt;
  int64_t out = 0;
  // By type first: get() would convert 3.0.
  if (value->type() == dom::element_type::INT64 && value->get(out) == simdjson::SUCCESS && out >= least && out <= most)
    return out;
  fail_type(name, *value, fmt::format("a whole number from {} to {}", least, most));
  return std::nullopt;
}

std::optional<double> FieldReader::real(std::string_view name, double least, double most) {
  const auto value = any(name);
  if (!value) return std::nullopt;
  double out = 0;
  if (value->is_number() && value->get(out) == simdjson::SUCCESS && std::isfinite(out) && out >= least && out <= most)
    return out;
  fail_type(name, *value, fmt::format("a number from {} to {}", least, most));
  return std::nullopt;
}

std::optional<std::string_view> FieldReader::text(std::string_view name) {
  const auto value = any(name);
  if (!value) return std::nullopt;
  std::string_view out;
  if (value->get(out) == simdjson::SUCCESS) return out;
  fail_type(name, *value, "a string");
  return std::nullopt;
}

std::optional<dom::object> FieldReader::object(std::string_view name) {
  const auto value = any(name);
  if (!value) return std::nullopt;
  dom::object out;
  if (value->get(out) == simdjson::SUCCESS) return out;
  fail_type(name, *value, "an object");
  return std::nullopt;
}

std::optional<dom::array> FieldReader::array(std::string_view name) {
  const auto value = any(name);
  if (!value) return std::nullopt;
  dom::array out;
  if (value->get(out) == simdjson::SUCCESS) return out;
  fail_type(name, *value, "a list");
  return std::nullopt;
}

int64_t FieldReader::required_integer(std::string_view name, int64_t least, int64_t most) {
  if (!any(name)) fail(name, fmt::format("{}{} is missing", path_, name));
  return integer(name, least, most).value_or(least);
}

std::string_view FieldReader::required_text(std::string_view name) {
  if (!any(name)) fail(name, fmt::format("{}{} is missing", path_, name));
  return text(name).value_or(std::string_view{});
}

Result<dom::object> parse_object(dom::parser& parser, std::string_view text, std::string_view what) {
  dom::element root;
  if (const auto error = parser.parse(text.data(), text.size(), true).get(root); error != simdjson::SUCCESS)
    return invalid(fmt::format("{} cannot be read as JSON: {}", what, simdjson::error_message(error)));
  dom::object object;
  if (root.get(object) != simdjson::SUCCESS)
    return invalid(fmt::format("{}: got {}, accepted: a JSON object", what, shown(root)));
  return object;
}

}  // namespace kindred::engine
