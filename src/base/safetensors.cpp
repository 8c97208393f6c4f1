#include "base/safetensors.h"

#include <fmt/format.h>
#include <simdjson.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <limits>
#include <optional>

#include "base/bytes.h"
#include "base/config.h"

namespace kindred {
namespace {

static_assert(std::endian::native == std::endian::little, "tensors are read and written in place");

constexpr size_t kLengthBytes = 8;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the reference's bound
constexpr size_t kMaxTensors = 65'536;
constexpr size_t kMaxDims = 8;
constexpr size_t kAlignment = 8;  // of the data; the reference pads the header with spaces

Error corrupt(std::string message) { return Error{ErrorCode::kCorrupt, "safetensors: " + std::move(message)}; }

std::optional<TensorType> parse_type(std::string_view name) {
  for (const TensorType type : {TensorType::kU8, TensorType::kU16, TensorType::kU32, TensorType::kF32}) {
    if (name == to_string(type)) return type;
  }
  return std::nullopt;
}

bool read_numbers(const simdjson::dom::object& object, std::string_view key, size_t most, std::vector<uint64_t>& out) {
  simdjson::dom::array array;
  if (object[key].get(array) != simdjson::SUCCESS) return false;
  for (const simdjson::dom::element element : array) {
    uint64_t value = 0;
    if (out.size() == most || element.get(value) != simdjson::SUCCESS) return false;
    out.push_back(value);
  }
  return true;
}

// Bytes of a tensor, or none if the product overflows.
std::optional<uint64_t> shape_bytes(TensorType type, std::span<const uint64_t> shape) {
  uint64_t bytes = bytes_per_element(type);
  if (std::find(shape.begin(), shape.end(), 0U) != shape.end()) return 0;
  for (const uint64_t size : shape) {
    if (bytes > std::numeric_limits<uint64_t>::max() / size) return std::nullopt;
    bytes *= size;
  }
  return bytes;
}

Result<Safetensors::Tensor> parse_tensor(std::string_view name, const simdjson::dom::element& value,
                                         uint64_t data_begin, uint64_t data_size) {
  const std::string quoted = json_string(name);
  simdjson::dom::object object;
  std::string_view type_name;
  if (value.get(object) != simdjson::SUCCESS || object["dtype"].get(type_name) != simdjson::SUCCESS) {
    return corrupt(fmt::format("tensor {} has no dtype", quoted));
  }
  const std::optional<TensorType> type = parse_type(type_name);
  if (!type) {
    return corrupt(fmt::format("tensor {} has dtype {}; accepted: U8, U16, U32, F32", quoted, json_string(type_name)));
  }
  Safetensors::Tensor tensor;
  tensor.type = *type;
  std::vector<uint64_t> offsets;
  if (!read_numbers(object, "shape", kMaxDims, tensor.shape) || !read_numbers(object, "data_offsets", 2, offsets) ||
      offsets.size() != 2) {
    return corrupt(fmt::format("tensor {} has no valid shape and data_offsets", quoted));
  }
  if (offsets[0] > offsets[1] || offsets[1] > data_size) {
    return corrupt(fmt::format("tensor {} reaches to byte {} of {}", quoted, offsets[1], data_size));
  }
  tensor.offset = data_begin + offsets[0];
  tensor.size = offsets[1] - offsets[0];
  const std::optional<uint64_t> wanted = shape_bytes(*type, tensor.shape);
  if (!wanted || *wanted != tensor.size) {
    return corrupt(
        fmt::format("tensor {}: {} bytes do not match shape [{}]", quoted, tensor.size, fmt::join(tensor.shape, ", ")));
  }
  return tensor;
}

}  // namespace

size_t bytes_per_element(TensorType type) {
  switch (type) {
    case TensorType::kU8: return 1;
    case TensorType::kU16: return 2;
    case TensorType::kU32:
    case TensorType::kF32: return 4;
  }
  return 0;
}

std::string_view to_string(TensorType type) {
  switch (type) {
    case TensorType::kU8: return "U8";
    case TensorType::kU16: return "U16";
    case TensorType::kU32: return "U32";
    case TensorType::kF32: return "F32";
  }
  return "";
}

Result<Safetensors> Safetensors::parse(std::string bytes) {
  if (bytes.size() < kLengthBytes) return corrupt(fmt::format("{} bytes are no file of this kind", bytes.size()));
  uint64_t header_size = 0;
  std::memcpy(&header_size, bytes.data(), kLengthBytes);
  if (header_size > kMaxHeaderBytes || header_size > bytes.size() - kLengthBytes) {
    return corrupt(fmt::format("header of {} bytes in a file of {}", header_size, bytes.size()));
  }
  Safetensors file;
  file.bytes_ = std::move(bytes);
  const uint64_t data_begin = kLengthBytes + header_size;
  const std::string_view header(file.bytes_.data() + kLengthBytes, header_size);
  if (Status parsed = file.parse_header(header, data_begin); !parsed) return std::move(parsed).error();
  if (Status covered = file.check_cover(data_begin); !covered) return std::move(covered).error();
  return file;
}

Status Safetensors::parse_header(std::string_view header, uint64_t data_begin) {
  simdjson::dom::parser parser;
  simdjson::dom::object object;
  if (parser.parse(header.data(), header.size(), true).get(object) != simdjson::SUCCESS) {
    return corrupt("the header is not a JSON object");
  }
  bool metadata_seen = false;
  for (const simdjson::dom::key_value_pair field : object) {
    if (field.key == "__metadata__") {
      simdjson::dom::object strings;
      if (metadata_seen || field.value.get(strings) != simdjson::SUCCESS) return corrupt("bad __metadata__");
      metadata_seen = true;
      for (const simdjson::dom::key_value_pair entry : strings) {
        std::string_view text;
        if (entry.value.get(text) != simdjson::SUCCESS || !metadata_.emplace(entry.key, text).second) {
          return corrupt(fmt::format("metadata {} is not one string", json_string(entry.key)));
        }
      }
      continue;
    }
    if (tensors_.size() == kMaxTensors) return corrupt(fmt::format("more than {} tensors", kMaxTensors));
    Result<Tensor> tensor = parse_tensor(field.key, field.value, data_begin, bytes_.size() - data_begin);
    if (!tensor) return std::move(tensor).error();
    if (!tensors_.emplace(field.key, *std::move(tensor)).second) {
      return corrupt(fmt::format("tensor {} appears twice", json_string(field.key)));
    }
  }
  return {};
}

Status Safetensors::check_cover(uint64_t data_begin) const {
  std::vector<const Tensor*> ordered;
  ordered.reserve(tensors_.size());
  for (const auto& [name, tensor] : tensors_) ordered.push_back(&tensor);
  std::sort(ordered.begin(), ordered.end(), [](const Tensor* a, const Tensor* b) {
    return a->offset != b->offset ? a->offset < b->offset : a->size < b->size;
  });
  uint64_t at = data_begin;
  for (const Tensor* tensor : ordered) {
    if (tensor->offset != at) return corrupt("tensors overlap or leave a gap");
    at += tensor->size;
  }
  if (at != bytes_.size()) return corrupt(fmt::format("{} bytes behind the last tensor", bytes_.size() - at));
  return {};
}

Result<Safetensors> Safetensors::load(const std::string& path) {
  Result<std::string> bytes = read_file(path);
  if (!bytes) return std::move(bytes).error();
  Result<Safetensors> file = parse(*std::move(bytes));
  if (!file) {
    Error error = std::move(file).error();
    error.message = path + ": " + error.message;
    return error;
  }
  return file;
}

const Safetensors::Tensor* Safetensors::find(std::string_view name) const {
  const auto it = tensors_.find(name);
  return it == tensors_.end() ? nullptr : &it->second;
}

Result<const Safetensors::Tensor*> Safetensors::expect(std::string_view name, TensorType type, size_t dims) const {
  const Tensor* tensor = find(name);
  if (tensor == nullptr) return invalid(fmt::format("tensor '{}' is missing", name), std::string(name));
  if (tensor->type != type || tensor->shape.size() != dims) {
    return invalid(fmt::format("tensor '{}' is {} [{}]; accepted: {} with {} dimensions", name, to_string(tensor->type),
                               fmt::join(tensor->shape, ", "), to_string(type), dims),
                   std::string(name));
  }
  return tensor;
}

Result<std::string> Safetensors::metadata(std::string_view key) const {
  const auto it = metadata_.find(key);
  if (it == metadata_.end()) return invalid(fmt::format("metadata '{}' is missing", key), std::string(key));
  return it->second;
}

Result<uint64_t> Safetensors::metadata_number(std::string_view key) const {
  const Result<std::string> text = metadata(key);
  if (!text) return text.error();
  uint64_t value = 0;
  const char* last = text->data() + text->size();
  const auto [end, error] = std::from_chars(text->data(), last, value);
  if (error != std::errc{} || end != last) {
    return invalid(fmt::format("metadata '{}' is {}; accepted: a whole number", key, json_string(*text)),
                   std::string(key));
  }
  return value;
}

void SafetensorsWriter::add(std::string name, TensorType type, std::vector<uint64_t> shape,
                            std::span<const uint8_t> bytes) {
  const std::optional<uint64_t> wanted = shape_bytes(type, shape);
  KINDRED_CHECK(wanted && *wanted == bytes.size());
  tensors_.push_back({std::move(name), type, std::move(shape), bytes});
}

std::string SafetensorsWriter::finish() const {
  std::string header = "{";
  if (!metadata_.empty()) {
    header += R"("__metadata__":{)";
    for (const auto& [key, value] : metadata_) {
      if (header.back() != '{') header += ',';
      header += json_string(key) + ":" + json_string(value);
    }
    header += '}';
  }
  uint64_t offset = 0;
  for (const Entry& entry : tensors_) {
    if (header.size() > 1) header += ',';
    header += fmt::format(R"({}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})", json_string(entry.name),
                          to_string(entry.type), fmt::join(entry.shape, ","), offset, offset + entry.bytes.size());
    offset += entry.bytes.size();
  }
  header += '}';
  header.resize((header.size() + kAlignment - 1) / kAlignment * kAlignment, ' ');

  const uint64_t header_size = header.size();
  std::string out(kLengthBytes, '\0');
  std::memcpy(out.data(), &header_size, kLengthBytes);
  out.reserve(kLengthBytes + header_size + offset);
  out += header;
  for (const Entry& entry : tensors_) out.append(as_text(entry.bytes));
  return out;
}

}  // namespace kindred
