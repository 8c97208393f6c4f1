#include "expert/metadata.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "base/bytes.h"
#include "base/json.h"

namespace kindred::expert {
namespace {

Error not_a_list(std::string_view key, std::string_view of) {
  return invalid(fmt::format("metadata '{}' is not a JSON list of {}", key, of), std::string(key));
}

// `convert` returns whether the element is acceptable and appends it.
template <class T, class Convert>
Result<std::vector<T>> list(const Safetensors& file, std::string_view key, std::string_view of, Convert convert) {
  std::vector<T> out;
  const Result<std::string> text = file.metadata(key);
  if (!text) return out;
  const Json parsed = parse_json(*text);
  if (!parsed.is_array()) return not_a_list(key, of);
  out.reserve(parsed.size());
  for (const Json& element : parsed) {
    if (!convert(element, out)) return not_a_list(key, of);
  }
  return out;
}

}  // namespace

Result<std::vector<uint32_t>> metadata_indices(const Safetensors& file, std::string_view key) {
  return list<uint32_t>(file, key, "whole numbers", [](const Json& element, std::vector<uint32_t>& out) {
    if (!element.is_number_unsigned()) return false;
    const auto value = element.get<uint64_t>();
    if (value > std::numeric_limits<uint32_t>::max()) return false;
    out.push_back(static_cast<uint32_t>(value));
    return true;
  });
}

Result<std::vector<double>> metadata_reals(const Safetensors& file, std::string_view key) {
  return list<double>(file, key, "numbers", [](const Json& element, std::vector<double>& out) {
    if (!element.is_number() || !std::isfinite(element.get<double>())) return false;
    out.push_back(element.get<double>());
    return true;
  });
}

Result<std::vector<std::string>> metadata_strings(const Safetensors& file, std::string_view key) {
  return list<std::string>(file, key, "strings", [](const Json& element, std::vector<std::string>& out) {
    if (!element.is_string()) return false;
    out.push_back(element.get<std::string>());
    return true;
  });
}

std::string to_json(std::span<const uint32_t> indices) { return fmt::format("[{}]", fmt::join(indices, ",")); }

std::string to_json(std::span<const double> reals) { return fmt::format("[{}]", fmt::join(reals, ",")); }

std::string to_json(std::span<const std::string> strings) {
  std::string out = "[";
  for (const std::string& text : strings) {
    if (out.size() > 1) out += ',';
    append_json_string(out, text);
  }
  return out + "]";
}

Result<ExpertShape> checked_shape(ExpertShape shape) {
  if (shape.layers.empty()) return invalid("the list of layers is missing or empty", "layers");
  for (size_t l = 1; l < shape.layers.size(); ++l) {
    if (shape.layers[l] <= shape.layers[l - 1]) return invalid("layers are not ascending", "layers");
  }
  if (shape.experts == 0 || shape.experts > kMaxCells / shape.layers.size()) {
    return invalid(
        fmt::format("{} layers of {} experts; accepted: 1 to {} cells", shape.layers.size(), shape.experts, kMaxCells),
        "experts");
  }
  if (shape.top_k == 0 || shape.top_k > shape.experts) {
    return invalid(fmt::format("top_k is {}; accepted: 1 to {}", shape.top_k, shape.experts), "top_k");
  }
  return shape;
}

}  // namespace kindred::expert
