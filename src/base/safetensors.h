// The safetensors format: an 8-byte little-endian header length, a JSON header
//   {"__metadata__": {"k": "v"}, "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
// and the tensors' bytes, row-major and little-endian. (huggingface/safetensors, README "Format".)
// Only U8, U16, U32 and F32, all that our files need.
//
// Thread-safety: immutable once parsed; a writer belongs to one thread.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/result.h"

namespace kindred {

enum class TensorType { kU8, kU16, kU32, kF32 };

size_t bytes_per_element(TensorType type);
std::string_view to_string(TensorType type);  // "U8", ...

template <class T>
constexpr TensorType tensor_type_of() {
  if constexpr (std::is_same_v<T, uint8_t>) return TensorType::kU8;
  else if constexpr (std::is_same_v<T, uint16_t>) return TensorType::kU16;
  else if constexpr (std::is_same_v<T, uint32_t>) return TensorType::kU32;
  else {
    static_assert(std::is_same_v<T, float>);
    return TensorType::kF32;
  }
}

class Safetensors {
 public:
  struct Tensor {
    TensorType type = TensorType::kU8;
    std::vector<uint64_t> shape;
    uint64_t offset = 0, size = 0;  // bytes in the file
  };

  // Untrusted input: lengths, types, shapes and offsets are checked against each other; the tensors
  // must cover the data without gap or overlap, as the reference demands. Error: kCorrupt.
  static Result<Safetensors> parse(std::string bytes);
  // Error: kIo, kCorrupt; the message starts with the path.
  static Result<Safetensors> load(const std::string& path);

  bool has(std::string_view name) const { return tensors_.contains(name); }
  // Null if absent.
  const Tensor* find(std::string_view name) const;
  // A copy, since tensors need not be aligned in the file. `dims`: expected number of dimensions.
  // Error: kInvalid if absent, of another type or another number of dimensions.
  template <class T>
  Result<std::vector<T>> read(std::string_view name, size_t dims) const {
    Result<const Tensor*> tensor = expect(name, tensor_type_of<T>(), dims);
    if (!tensor) return std::move(tensor).error();
    std::vector<T> out((*tensor)->size / sizeof(T));
    if (!out.empty()) std::memcpy(out.data(), bytes_.data() + (*tensor)->offset, (*tensor)->size);
    return out;
  }
  // Error: kInvalid, naming the key.
  Result<std::string> metadata(std::string_view key) const;
  Result<uint64_t> metadata_number(std::string_view key) const;

 private:
  Result<const Tensor*> expect(std::string_view name, TensorType type, size_t dims) const;
  Status parse_header(std::string_view header, uint64_t data_begin);
  Status check_cover(uint64_t data_begin) const;

  std::string bytes_;
  std::map<std::string, Tensor, std::less<>> tensors_;
  std::map<std::string, std::string, std::less<>> metadata_;
};

class SafetensorsWriter {
 public:
  void metadata(std::string key, std::string value) { metadata_[std::move(key)] = std::move(value); }

  // Copies nothing: `values` must live until finish(). Size and shape must agree.
  template <class T>
  void tensor(std::string name, std::vector<uint64_t> shape, std::span<const T> values) {
    add(std::move(name), tensor_type_of<T>(), std::move(shape),
        {reinterpret_cast<const uint8_t*>(values.data()), values.size_bytes()});
  }

  // The file's bytes; data starts at a multiple of 8.
  std::string finish() const;

 private:
  struct Entry {
    std::string name;
    TensorType type;
    std::vector<uint64_t> shape;
    std::span<const uint8_t> bytes;
  };
  void add(std::string name, TensorType type, std::vector<uint64_t> shape, std::span<const uint8_t> bytes);

  std::map<std::string, std::string> metadata_;
  std::vector<Entry> tensors_;
};

}  // namespace kindred
