#include "expert/gates.h"

#include <fmt/format.h>

#include <bit>
#include <cmath>
#include <limits>

#include "base/bytes.h"
#include "base/json.h"

namespace kindred::expert {
namespace {

constexpr size_t kGateBytes = sizeof(float);

Error wrong_gates(std::string_view field, std::string_view accepted) {
  return invalid(fmt::format("expert_gates.{}: accepted: {}", field, accepted), std::string(field));
}

const Json* gates_member(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found == object.end() ? nullptr : &*found;
}

// A whole number from 1 to 2^32 - 1, else 0.
uint32_t positive(const Json* value) {
  if (value == nullptr || !value->is_number_unsigned()) return 0;
  const auto number = value->get<uint64_t>();
  return number > std::numeric_limits<uint32_t>::max() ? 0 : static_cast<uint32_t>(number);
}

Status read_gate_layers(const Json& object, size_t limit, std::vector<uint32_t>& layers) {
  constexpr std::string_view kAccepted = "a list of ascending layer indices";
  const Json* list = gates_member(object, "layers");
  if (list == nullptr || !list->is_array() || list->empty()) return wrong_gates("layers", kAccepted);
  if (list->size() > limit) return Error{ErrorCode::kTooLarge, "expert_gates.layers: too many", "layers"};
  for (const Json& item : *list) {
    if (!item.is_number_unsigned() || item.get<uint64_t>() > std::numeric_limits<uint32_t>::max() ||
        (!layers.empty() && item.get<uint64_t>() <= layers.back())) {
      return wrong_gates("layers", kAccepted);
    }
    layers.push_back(item.get<uint32_t>());
  }
  return {};
}

Status read_gate_data(const Json& object, size_t cells, std::vector<float>& data) {
  const Json* text = gates_member(object, "data");
  if (text == nullptr || !text->is_string()) return wrong_gates("data", "base64");
  const auto& encoded = text->get_ref<const std::string&>();
  const size_t size = cells * kGateBytes;
  const size_t text_size = (size + 2) / 3 * 4;
  if (encoded.size() != text_size) {
    return wrong_gates("data", fmt::format("{} base64 characters for this shape, not {}", text_size, encoded.size()));
  }
  const auto bytes = base64_decode(encoded);
  if (!bytes) return wrong_gates("data", "base64");
  if (bytes->size() != size) return wrong_gates("data", fmt::format("{} bytes for this shape", size));
  data.resize(cells);
  for (size_t i = 0; i < cells; ++i) {
    uint32_t bits = 0;
    for (size_t b = 0; b < kGateBytes; ++b) bits |= static_cast<uint32_t>((*bytes)[i * kGateBytes + b]) << (8 * b);
    data[i] = std::bit_cast<float>(bits);
    if (!std::isfinite(data[i]) || data[i] < 0) return wrong_gates("data", "finite numbers from 0");
  }
  return {};
}

}  // namespace

std::string gates_to_json(const ExpertGates& gates) {
  std::vector<uint8_t> bytes;
  bytes.reserve(gates.data.size() * kGateBytes);
  for (const float gate : gates.data) {
    const auto bits = std::bit_cast<uint32_t>(gate);
    for (int shift = 0; shift < 32; shift += 8) bytes.push_back(static_cast<uint8_t>(bits >> shift));
  }
  return fmt::format(R"({{"v":1,"dtype":"f32","layers":[{}],"experts":{},"data":"{}"}})", fmt::join(gates.layers, ","),
                     gates.experts, base64_encode(bytes));
}

Result<ExpertGates> gates_from_json(std::string_view json, size_t limit_cells) {
  const Json object = parse_json(json);
  if (!object.is_object()) return invalid("expert_gates: not a JSON object");
  const Json* version = gates_member(object, "v");
  if (version == nullptr || *version != 1) return wrong_gates("v", "1");
  const Json* dtype = gates_member(object, "dtype");
  if (dtype == nullptr || *dtype != "f32") return wrong_gates("dtype", "\"f32\"");
  ExpertGates gates;
  if (Status read = read_gate_layers(object, limit_cells, gates.layers); !read) return std::move(read).error();
  gates.experts = positive(gates_member(object, "experts"));
  if (gates.experts == 0) return wrong_gates("experts", "a whole number from 1");
  if (gates.experts > limit_cells / gates.layers.size()) {
    return Error{ErrorCode::kTooLarge,
                 fmt::format("expert_gates: {} layers of {} experts are more than the {} cells accepted",
                             gates.layers.size(), gates.experts, limit_cells),
                 "experts"};
  }
  if (Status read = read_gate_data(object, gates.layers.size() * gates.experts, gates.data); !read) {
    return std::move(read).error();
  }
  return gates;
}

}  // namespace kindred::expert
