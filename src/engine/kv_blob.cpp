#include "engine/kv_blob.h"

#include <fmt/format.h>
#include <ggml.h>

#include <cstring>
#include <string>
#include <string_view>

namespace kindred::engine {
namespace {

constexpr uint32_t kMostLayers = 4096;

class Reader {
 public:
  explicit Reader(std::span<const uint8_t> bytes) : bytes_(bytes) {}

  template <class T>
  T read() {
    T value{};
    if (failed_ || bytes_.size() < sizeof(T)) {
      failed_ = true;
      return value;
    }
    std::memcpy(&value, bytes_.data(), sizeof(T));
    bytes_ = bytes_.subspan(sizeof(T));
    return value;
  }

  std::span<const uint8_t> take(uint64_t size) {
    if (failed_ || bytes_.size() < size) {
      failed_ = true;
      return {};
    }
    const auto part = bytes_.first(size);
    bytes_ = bytes_.subspan(size);
    return part;
  }

  bool failed() const { return failed_; }
  bool at_end() const { return bytes_.empty(); }

 private:
  std::span<const uint8_t> bytes_;
  bool failed_ = false;
};

Error corrupt(std::string_view what) { return {ErrorCode::kCorrupt, fmt::format("KV blob: {}", what)}; }

template <class T>
bool all_finite(std::span<const uint8_t> bytes, T exponent) {
  bool finite = true;
  for (size_t i = 0; i + sizeof(T) <= bytes.size(); i += sizeof(T)) {
    T bits;
    std::memcpy(&bits, bytes.data() + i, sizeof(T));
    finite &= (bits & exponent) != exponent;
  }
  return finite;
}

bool all_finite(std::span<const uint8_t> bytes, int32_t type) {
  switch (type) {
    case GGML_TYPE_F16: return all_finite<uint16_t>(bytes, 0x7c00);
    case GGML_TYPE_BF16: return all_finite<uint16_t>(bytes, 0x7f80);
    case GGML_TYPE_F32: return all_finite<uint32_t>(bytes, 0x7f800000);
    default: return true;  // quantised: llama.cpp's own conversion bounds them
  }
}

// The blob's own idea of its layout; `data` receives each part with its type.
template <class OnData>
Result<KvLayout> walk(std::span<const uint8_t> blob, uint32_t tokens, OnData on_data) {
  Reader in(blob);
  KvLayout layout;
  layout.known = true;
  layout.magic = in.read<uint32_t>();
  in.read<int32_t>();
  if (in.read<uint32_t>() != 1) return corrupt("not one stream");
  if (in.read<uint32_t>() != tokens) return corrupt("the number of cells is not that of the prompt's tokens");
  // Cells come in the order of the cache, which need not be that of positions.
  std::vector<bool> seen(tokens, false);
  for (uint32_t i = 0; i < tokens; ++i) {
    const auto position = in.read<int32_t>();
    const auto sequences = in.read<uint32_t>();
    in.read<int32_t>();
    if (in.failed() || sequences != 1 || position < 0 || static_cast<uint32_t>(position) >= tokens ||
        seen[static_cast<size_t>(position)]) {
      return corrupt("its positions are not those of the prompt");
    }
    seen[static_cast<size_t>(position)] = true;
  }
  const auto transposed = in.read<uint32_t>();
  const auto layers = in.read<uint32_t>();
  if (in.failed() || transposed > 1 || layers == 0 || layers > kMostLayers) return corrupt("damaged layer table");
  layout.transposed = transposed == 1;
  const auto rows = [&](bool by_element) {
    KvLayout::Rows rows_of;
    rows_of.type = in.read<int32_t>();
    if (by_element) {
      rows_of.element_bytes = in.read<uint32_t>();
      rows_of.cell_bytes = uint64_t{rows_of.element_bytes} * in.read<uint32_t>();
    } else {
      rows_of.cell_bytes = in.read<uint64_t>();
    }
    // Bounded before it is multiplied: a row is no longer than the blob.
    const bool sane = !in.failed() && rows_of.cell_bytes <= blob.size();
    const auto data = in.take(sane ? rows_of.cell_bytes * tokens : UINT64_MAX);
    if (!in.failed()) on_data(data, rows_of.type);
    return rows_of;
  };
  for (uint32_t l = 0; l < layers && !in.failed(); ++l) layout.keys.push_back(rows(false));
  for (uint32_t l = 0; l < layers && !in.failed(); ++l) layout.values.push_back(rows(layout.transposed));
  if (in.failed()) return corrupt("truncated");
  if (!in.at_end()) return corrupt("bytes behind its end");
  return layout;
}

}  // namespace

uint64_t KvLayout::cell_bytes() const {
  uint64_t bytes = 3 * sizeof(int32_t);
  for (const Rows& rows : keys) bytes += rows.cell_bytes;
  for (const Rows& rows : values) bytes += rows.cell_bytes;
  return bytes;
}

KvLayout learn_kv_layout(std::span<const uint8_t> blob, uint32_t tokens) {
  auto layout = walk(blob, tokens, [](std::span<const uint8_t>, int32_t) {});
  if (layout) return std::move(layout).value();
  KvLayout unknown;
  unknown.magic = Reader(blob).read<uint32_t>();
  return unknown;
}

Status check_kv_blob(std::span<const uint8_t> blob, const KvLayout& layout, uint32_t tokens) {
  if (Reader(blob).read<uint32_t>() != layout.magic) return corrupt("not a KV blob");
  if (!layout.known) return {};
  bool finite = true;
  const auto found =
      walk(blob, tokens, [&](std::span<const uint8_t> data, int32_t type) { finite &= all_finite(data, type); });
  if (!found) return found.error();
  if (*found != layout) return corrupt("its layers are not those of this model");
  if (!finite) return corrupt("it holds values that are not numbers");
  return {};
}

}  // namespace kindred::engine
