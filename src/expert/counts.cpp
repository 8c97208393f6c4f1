#include "expert/counts.h"

#include <fmt/format.h>
#include <simdjson.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <type_traits>

#include "base/bytes.h"

namespace kindred::expert {
namespace {

constexpr uint64_t kMaxTokens = std::numeric_limits<uint32_t>::max();  // so that any count fits u32
constexpr uint64_t kMaxU16 = std::numeric_limits<uint16_t>::max();

void append_counts(std::string& out, const ExpertCounts& counts, std::string_view suffix) {
  const bool narrow = counts.tokens <= kMaxU16;
  std::vector<uint8_t> bytes;
  bytes.reserve(counts.data.size() * (narrow ? 2 : 4));
  for (const uint32_t count : counts.data) {
    for (int shift = 0; shift < (narrow ? 16 : 32); shift += 8) bytes.push_back(static_cast<uint8_t>(count >> shift));
  }
  out += fmt::format(R"({{"v":1,"dtype":"{}","layers":[{}],"experts":{},"top_k":{},"tokens":{},"data":"{}"{}}})",
                     narrow ? "u16" : "u32", fmt::join(counts.shape.layers, ","), counts.shape.experts,
                     counts.shape.top_k, counts.tokens, base64_encode(bytes), suffix);
}

Error wrong(std::string_view field, std::string_view accepted) {
  return invalid(fmt::format("expert_counts.{}: accepted: {}", field, accepted), std::string(field));
}

Result<uint64_t> number(const simdjson::dom::object& object, std::string_view field, uint64_t least, uint64_t most) {
  uint64_t value = 0;
  if (object[field].get(value) != simdjson::SUCCESS || value < least || value > most) {
    return wrong(field, fmt::format("a whole number from {} to {}", least, most));
  }
  return value;
}

Result<std::vector<uint32_t>> layer_list(const simdjson::dom::object& object, size_t limit) {
  constexpr std::string_view kAccepted = "a list of ascending layer indices";
  simdjson::dom::array array;
  if (object["layers"].get(array) != simdjson::SUCCESS) return wrong("layers", kAccepted);
  std::vector<uint32_t> layers;
  for (const simdjson::dom::element element : array) {
    uint64_t layer = 0;
    if (element.get(layer) != simdjson::SUCCESS || layer > std::numeric_limits<uint32_t>::max() ||
        (!layers.empty() && layer <= layers.back())) {
      return wrong("layers", kAccepted);
    }
    if (layers.size() == limit) return Error{ErrorCode::kTooLarge, "expert_counts.layers: too many", "layers"};
    layers.push_back(static_cast<uint32_t>(layer));
  }
  if (layers.empty()) return wrong("layers", kAccepted);
  return layers;
}

Result<ExpertShape> parse_shape(const simdjson::dom::object& object, size_t limit_cells) {
  ExpertShape shape;
  Result<std::vector<uint32_t>> layers = layer_list(object, limit_cells);
  if (!layers) return std::move(layers).error();
  shape.layers = *std::move(layers);
  const Result<uint64_t> experts = number(object, "experts", 1, std::numeric_limits<uint32_t>::max());
  if (!experts) return experts.error();
  if (*experts > limit_cells / shape.layers.size()) {
    return Error{ErrorCode::kTooLarge,
                 fmt::format("expert_counts: {} layers of {} experts are more than the {} cells accepted",
                             shape.layers.size(), *experts, limit_cells),
                 "experts"};
  }
  const Result<uint64_t> top_k = number(object, "top_k", 1, *experts);
  if (!top_k) return top_k.error();
  shape.experts = static_cast<uint32_t>(*experts);
  shape.top_k = static_cast<uint32_t>(*top_k);
  return shape;
}

// Little-endian numbers of type T, as many as `out` holds. False: one is above `most`.
template <class T>
bool widen(std::span<const uint8_t> bytes, uint32_t most, std::span<uint32_t> out) {
  static_assert(std::endian::native == std::endian::little);
  KINDRED_CHECK(bytes.size() == out.size() * sizeof(T));
  // The sign of most - value, gathered over all: unlike a maximum, it needs no branch on any processor.
  using Signed = std::conditional_t<sizeof(T) == 2, int32_t, int64_t>;
  const auto limit = static_cast<Signed>(std::min<uint32_t>(most, std::numeric_limits<T>::max()));
  Signed room = 0;
  for (size_t i = 0; i < out.size(); ++i) {
    T value;
    std::memcpy(&value, bytes.data() + i * sizeof(T), sizeof(T));
    out[i] = value;
    room |= limit - static_cast<Signed>(value);
  }
  return room >= 0;
}

Status parse_data(const simdjson::dom::object& object, ExpertCounts& counts, bool narrow) {
  std::string_view text;
  if (object["data"].get(text) != simdjson::SUCCESS) return wrong("data", "base64");
  const size_t width = narrow ? 2 : 4;
  const size_t size = counts.shape.cells() * width;
  const size_t text_size = (size + 2) / 3 * 4;  // base64 with padding
  if (text.size() != text_size) {
    return wrong("data", fmt::format("{} base64 characters for this shape, not {}", text_size, text.size()));
  }
  const Result<std::vector<uint8_t>> bytes = base64_decode(text);
  if (!bytes) return bytes.error();
  if (bytes->size() != size) return wrong("data", fmt::format("{} bytes for this shape", size));
  counts.data = std::vector<uint32_t>(counts.shape.cells());
  const auto most = static_cast<uint32_t>(counts.tokens);
  // A token selects an expert at most once.
  if (!(narrow ? widen<uint16_t>(*bytes, most, counts.data) : widen<uint32_t>(*bytes, most, counts.data))) {
    return wrong("data", fmt::format("counts up to `tokens` ({})", counts.tokens));
  }
  if (!counts.rows_sum_to_tokens()) return wrong("data", "rows that sum to tokens * top_k");
  return {};
}

Result<ExpertCounts> parse_counts(const simdjson::dom::object& object, size_t limit_cells) {
  const Result<uint64_t> version = number(object, "v", 1, 1);
  if (!version) return version.error();
  std::string_view dtype;
  if (object["dtype"].get(dtype) != simdjson::SUCCESS || (dtype != "u16" && dtype != "u32")) {
    return wrong("dtype", "\"u16\", \"u32\"");
  }
  Result<ExpertShape> shape = parse_shape(object, limit_cells);
  if (!shape) return std::move(shape).error();
  const Result<uint64_t> tokens = number(object, "tokens", 0, kMaxTokens);
  if (!tokens) return tokens.error();
  ExpertCounts counts;
  counts.shape = *std::move(shape);
  counts.tokens = *tokens;
  if (const Status data = parse_data(object, counts, dtype == "u16"); !data) return data.error();
  return counts;
}

}  // namespace

void ExpertCounts::add(const ExpertCounts& other) {
  KINDRED_CHECK(shape == other.shape);
  tokens += other.tokens;
  for (size_t i = 0; i < data.size(); ++i) data[i] += other.data[i];
}

bool ExpertCounts::rows_sum_to_tokens() const {
  for (size_t l = 0; l < shape.layers.size(); ++l) {
    uint64_t sum = 0;
    for (const uint32_t count : row(l)) sum += count;
    if (sum != tokens * shape.top_k) return false;
  }
  return true;
}

std::string counts_to_json(const ExpertCounts& counts, const ExpertCounts* suffix) {
  std::string tail;
  if (suffix != nullptr) {
    tail = R"(,"suffix":)";
    append_counts(tail, *suffix, "");
  }
  std::string out;
  append_counts(out, counts, tail);
  return out;
}

Result<ExpertCounts> counts_from_json(std::string_view json, bool padded, size_t limit_cells) {
  simdjson::dom::parser parser;
  simdjson::dom::object object;
  if (parser.parse(json.data(), json.size(), !padded).get(object) != simdjson::SUCCESS) {
    return invalid("expert_counts: not a JSON object");
  }
  return parse_counts(object, limit_cells);
}

}  // namespace kindred::expert
