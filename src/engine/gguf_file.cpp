#include "engine/gguf_file.h"

#include <fmt/format.h>
#include <ggml.h>
#include <llama.h>
#include <xxhash.h>

#include <charconv>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <memory>
#include <optional>
#include <string_view>

#include "base/bytes.h"
#include "engine/gguf_handle.h"
#include "engine/llama_backend.h"

namespace kindred::engine {
namespace {

Error corrupt(const std::string& path, std::string_view what) {
  return {ErrorCode::kCorrupt, fmt::format("{}: {}", path, what)};
}

// The layer of "blk.<layer>.ffn_gate_inp.weight", the router of an MoE layer.
std::optional<uint32_t> moe_layer_of(std::string_view tensor) {
  constexpr std::string_view kPrefix = "blk.";
  constexpr std::string_view kSuffix = ".ffn_gate_inp.weight";
  if (!tensor.starts_with(kPrefix) || !tensor.ends_with(kSuffix)) return std::nullopt;
  tensor.remove_prefix(kPrefix.size());
  tensor.remove_suffix(kSuffix.size());
  uint32_t layer = 0;
  const auto [end, error] = std::from_chars(tensor.data(), tensor.data() + tensor.size(), layer);
  if (error != std::errc() || end != tensor.data() + tensor.size()) return std::nullopt;
  return layer;
}

Status check_extents(const gguf_context* gguf, const std::string& path, uint64_t file_bytes) {
  const uint64_t start = gguf_get_data_offset(gguf);
  for (int64_t i = 0; i < gguf_get_n_tensors(gguf); ++i) {
    const uint64_t offset = gguf_get_tensor_offset(gguf, i);
    const uint64_t size = gguf_get_tensor_size(gguf, i);
    if (start > file_bytes || offset > file_bytes - start || size > file_bytes - start - offset) {
      return corrupt(path, fmt::format("truncated: the file has {} bytes, but tensor '{}' ends at byte {}", file_bytes,
                                       gguf_get_tensor_name(gguf, i), start + offset + size));
    }
  }
  return {};
}

expert::ExpertShape expert_shape(const gguf_context* gguf, const std::string& architecture, uint32_t layers) {
  expert::ExpertShape shape;
  const uint32_t experts = gguf_number(gguf, architecture + ".expert_count").value_or(0);
  const uint32_t top_k = gguf_number(gguf, architecture + ".expert_used_count").value_or(0);
  if (experts == 0 || top_k == 0 || top_k > experts || experts > UINT16_MAX) return shape;
  std::vector<bool> moe(layers, false);
  for (int64_t i = 0; i < gguf_get_n_tensors(gguf); ++i) {
    const auto layer = moe_layer_of(gguf_get_tensor_name(gguf, i));
    if (layer && *layer + 1 < layers) moe[*layer] = true;
  }
  for (uint32_t layer = 0; layer < layers; ++layer) {
    if (moe[layer]) shape.layers.push_back(layer);
  }
  if (shape.layers.empty()) return shape;
  shape.experts = experts;
  shape.top_k = top_k;
  return shape;
}

// Two fine-tunes of one model differ only in their weights; reading them all would take minutes for
// a large model, so the hash takes a page at 64 places.
Result<std::string> fingerprint(const std::string& path, uint64_t head_bytes, uint64_t file_bytes) {
  constexpr size_t kPageBytes = 4096;
  constexpr uint64_t kSamples = 64;
  const File file(std::fopen(path.c_str(), "rb"));
  if (!file) return Error{ErrorCode::kIo, fmt::format("{}: cannot be opened", path)};
  struct FreeState {
    void operator()(XXH3_state_t* state) const { XXH3_freeState(state); }
  };
  const std::unique_ptr<XXH3_state_t, FreeState> state(XXH3_createState());
  XXH3_64bits_reset(state.get());
  std::vector<uint8_t> page(kPageBytes);
  const auto add = [&](uint64_t offset, uint64_t bytes) {
    if (fseeko(file.get(), static_cast<off_t>(offset), SEEK_SET) != 0) return false;
    while (bytes > 0) {
      const size_t want = static_cast<size_t>(std::min<uint64_t>(bytes, kPageBytes));
      if (std::fread(page.data(), 1, want, file.get()) != want) return false;
      XXH3_64bits_update(state.get(), page.data(), want);
      bytes -= want;
    }
    return true;
  };
  bool read = add(0, std::min(head_bytes, file_bytes));
  const uint64_t weights = file_bytes - std::min(head_bytes, file_bytes);
  for (uint64_t i = 0; read && i < kSamples && weights > 0; ++i) {
    const uint64_t offset = file_bytes - weights + weights / kSamples * i;
    read = add(offset, std::min<uint64_t>(kPageBytes, file_bytes - offset));
  }
  if (!read) return Error{ErrorCode::kIo, fmt::format("{}: cannot be read", path)};
  const std::string rest = fmt::format("{};{}", file_bytes, kv_class());
  XXH3_64bits_update(state.get(), rest.data(), rest.size());
  return hex64(XXH3_64bits_digest(state.get()));
}

}  // namespace

// gguf_get_val_* abort on a wrong type, so every read looks first.
std::optional<std::string> gguf_text(const gguf_context* gguf, const std::string& key) {
  const int64_t id = gguf_find_key(gguf, key.c_str());
  if (id < 0 || gguf_get_kv_type(gguf, id) != GGUF_TYPE_STRING) return std::nullopt;
  return std::string(gguf_get_val_str(gguf, id));
}

std::optional<uint32_t> gguf_number(const gguf_context* gguf, const std::string& key) {
  const int64_t id = gguf_find_key(gguf, key.c_str());
  if (id < 0) return std::nullopt;
  switch (gguf_get_kv_type(gguf, id)) {
    case GGUF_TYPE_UINT16: return gguf_get_val_u16(gguf, id);
    case GGUF_TYPE_UINT32: return gguf_get_val_u32(gguf, id);
    case GGUF_TYPE_INT32: {
      const int32_t value = gguf_get_val_i32(gguf, id);
      return value < 0 ? std::nullopt : std::optional<uint32_t>(value);
    }
    case GGUF_TYPE_UINT64: {
      const uint64_t value = gguf_get_val_u64(gguf, id);
      return value > UINT32_MAX ? std::nullopt : std::optional<uint32_t>(value);
    }
    default: return std::nullopt;
  }
}

Result<Gguf> open_gguf(const std::string& path) {
  const LlamaErrors errors;
  Gguf gguf;
  try {
    gguf.reset(gguf_init_from_file(path.c_str(), {.no_alloc = true, .ctx = nullptr}));
  } catch (const std::exception& e) {
    return corrupt(path, fmt::format("not a GGUF file, or damaged: {}", e.what()));
  }
  if (!gguf) return corrupt(path, fmt::format("not a GGUF file, or damaged: {}", errors.text()));
  return gguf;
}

std::string kv_class() {
  return fmt::format("llama.cpp 0.3.36; k f16, v {}; flash attention; unified", has_gpu() ? "f16" : "bf16");
}

Result<GgufSummary> inspect_gguf(const std::string& path) {
  init_llama();
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (!std::filesystem::exists(status)) return Error{ErrorCode::kNotFound, fmt::format("{}: no such file", path)};
  if (!std::filesystem::is_regular_file(status)) return invalid(fmt::format("{}: not a file", path));
  GgufSummary summary;
  summary.file_bytes = std::filesystem::file_size(path, error);
  if (error) return Error{ErrorCode::kIo, fmt::format("{}: {}", path, error.message())};

  auto opened = open_gguf(path);
  if (!opened) return std::move(opened).error();
  const Gguf gguf = std::move(opened).value();
  if (auto extents = check_extents(gguf.get(), path, summary.file_bytes); !extents) return std::move(extents).error();

  const auto architecture = gguf_text(gguf.get(), "general.architecture");
  if (!architecture) return corrupt(path, "general.architecture is missing");
  summary.architecture = *architecture;
  summary.name = gguf_text(gguf.get(), "general.name").value_or(std::filesystem::path(path).stem().string());
  summary.context_tokens = gguf_number(gguf.get(), *architecture + ".context_length").value_or(0);
  summary.layers = gguf_number(gguf.get(), *architecture + ".block_count").value_or(0);
  constexpr uint32_t kMostLayers = 4096;
  if (summary.layers > kMostLayers) return corrupt(path, fmt::format("{} layers", summary.layers));
  summary.tensors = static_cast<uint64_t>(gguf_get_n_tensors(gguf.get()));
  summary.experts = expert_shape(gguf.get(), *architecture, summary.layers);
  const auto type = gguf_number(gguf.get(), "general.file_type");
  summary.quantisation = type ? llama_ftype_name(static_cast<llama_ftype>(*type)) : "unknown";
  auto print = fingerprint(path, gguf_get_data_offset(gguf.get()), summary.file_bytes);
  if (!print) return std::move(print).error();
  summary.fingerprint = std::move(print).value();
  return summary;
}

}  // namespace kindred::engine
