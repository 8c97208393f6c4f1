#include "engine/widen.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <ggml.h>
#include <llama.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <filesystem>
#include <span>
#include <string_view>

#include "engine/gguf_file.h"
#include "engine/gguf_handle.h"

namespace kindred::engine {
namespace {

constexpr uint32_t kMostFactor = 64;

struct WidenedType {
  const char* name;
  ggml_type type;
  llama_ftype file_type;
};
constexpr auto kWidenedTypes = std::to_array<WidenedType>({
    {"f16", GGML_TYPE_F16, LLAMA_FTYPE_MOSTLY_F16},
    {"f32", GGML_TYPE_F32, LLAMA_FTYPE_ALL_F32},
    {"q8_0", GGML_TYPE_Q8_0, LLAMA_FTYPE_MOSTLY_Q8_0},
});

enum class Part { kOther, kIn, kOut, kUnknown };  // kIn: gate and up; kOut: down

// "blk.3.ffn_gate_exps.weight" and its like. Whatever else belongs to experts (biases, scales, fused
// matrices) we do not know how to widen.
Part part_of(std::string_view tensor) {
  if (tensor.ends_with(".ffn_gate_exps.weight") || tensor.ends_with(".ffn_up_exps.weight")) return Part::kIn;
  if (tensor.ends_with(".ffn_down_exps.weight")) return Part::kOut;
  return tensor.find("_exps") == std::string_view::npos ? Part::kOther : Part::kUnknown;
}

struct FreeGgml {
  void operator()(ggml_context* context) const { ggml_free(context); }
};
using Ggml = std::unique_ptr<ggml_context, FreeGgml>;

class Widener {
 public:
  Widener(std::string from, const WidenOptions& options, const WidenedType& type)
      : from_(std::move(from)), options_(options), type_(type) {}

  Status read_head();
  Status build_head(const GgufSummary& summary);
  Status write(const std::string& to);
  const WidenReport& report() const { return report_; }

 private:
  Status check_tensor(int64_t i, Part part) const;
  Status write_tensor(std::FILE* out, int64_t i);
  Status widen_expert(std::FILE* out, int64_t i, uint64_t expert);
  void convert_row(ggml_type source, const uint8_t* row, int64_t columns, float scale, std::vector<uint8_t>& to);
  void scale_blocks(const uint8_t* row, size_t bytes, float scale, std::vector<uint8_t>& to);
  Status read_at(uint64_t offset, std::span<uint8_t> to);
  Status put(std::FILE* out, std::span<const uint8_t> bytes) const;
  Error not_supported(std::string_view why) const { return invalid(fmt::format("{}: {}", from_, why), "IN"); }

  std::string from_;
  const WidenOptions& options_;
  const WidenedType& type_;
  Gguf source_, target_;
  Ggml tensors_;  // shapes of the target
  File in_;
  WidenReport report_;
  std::vector<uint8_t> matrix_, row_;
  std::vector<float> values_, back_;
};

Status Widener::read_head() {
  auto opened = open_gguf(from_);
  if (!opened) return std::move(opened).error();
  source_ = std::move(opened).value();
  in_.reset(std::fopen(from_.c_str(), "rb"));
  if (!in_) return Error{ErrorCode::kIo, fmt::format("{}: cannot be opened", from_)};
  return {};
}

Status Widener::check_tensor(int64_t i, Part part) const {
  const char* name = gguf_get_tensor_name(source_.get(), i);
  const int64_t* ne = gguf_get_tensor_ne(source_.get(), i);
  if (part == Part::kUnknown) return not_supported(fmt::format("tensor '{}' of the experts cannot be widened", name));
  if (part == Part::kOther) return {};
  const int64_t width = part == Part::kIn ? ne[1] : ne[0];
  if (width != report_.from_width || ne[3] != 1) {
    return not_supported(
        fmt::format("tensor '{}' has {} neurons, the metadata say {}", name, width, report_.from_width));
  }
  const ggml_type source = gguf_get_tensor_type(source_.get(), i);
  if (source != GGML_TYPE_F32 && ggml_get_type_traits(source)->to_float == nullptr) {
    return not_supported(fmt::format("tensor '{}' has type {}, which cannot be read", name, ggml_type_name(source)));
  }
  if (ne[0] % ggml_blck_size(type_.type) != 0) {
    return invalid(fmt::format("type: rows of {} weights cannot be {}; accepted: f16, f32", ne[0], type_.name), "type");
  }
  return {};
}

// Metadata and tensor table of the widened model.
Status Widener::build_head(const GgufSummary& summary) {
  const std::string width_key = summary.architecture + ".expert_feed_forward_length";
  const uint32_t width = gguf_number(source_.get(), width_key).value_or(0);
  if (summary.experts.experts == 0) return not_supported("the model has no experts");
  if (width == 0 || width > UINT32_MAX / kMostFactor) {
    return not_supported(fmt::format("'{}' is missing; only models that state it can be widened", width_key));
  }
  report_.from_width = width;
  report_.to_width = width * options_.factor;
  target_.reset(gguf_init_empty());
  gguf_set_kv(target_.get(), source_.get());
  gguf_set_val_u32(target_.get(), width_key.c_str(), report_.to_width);
  gguf_set_val_u32(target_.get(), "general.file_type", static_cast<uint32_t>(type_.file_type));
  const std::string name = fmt::format("{} widened x{}", summary.name, options_.factor);
  gguf_set_val_str(target_.get(), "general.name", name.c_str());

  const int64_t count = gguf_get_n_tensors(source_.get());
  tensors_.reset(ggml_init(
      {.mem_size = ggml_tensor_overhead() * static_cast<size_t>(count + 1), .mem_buffer = nullptr, .no_alloc = true}));
  const bool shared_width =
      gguf_number(source_.get(), summary.architecture + ".expert_shared_feed_forward_length") > 0U;
  uint32_t widened = 0;
  for (int64_t i = 0; i < count; ++i) {
    const std::string_view tensor_name = gguf_get_tensor_name(source_.get(), i);
    const Part part = part_of(tensor_name);
    if (Status fits = check_tensor(i, part); !fits) return fits;
    if (!shared_width && tensor_name.find("_shexp.") != std::string_view::npos) {
      return not_supported("the width of its shared expert follows from that of the others");
    }
    const int64_t* of = gguf_get_tensor_ne(source_.get(), i);
    std::array<int64_t, GGML_MAX_DIMS> ne{of[0], of[1], of[2], of[3]};
    if (part == Part::kIn) ne[1] *= options_.factor;
    if (part == Part::kOut) ne[0] *= options_.factor;
    const ggml_type type = part == Part::kOther ? gguf_get_tensor_type(source_.get(), i) : type_.type;
    ggml_tensor* tensor = ggml_new_tensor(tensors_.get(), type, GGML_MAX_DIMS, ne.data());
    ggml_set_name(tensor, gguf_get_tensor_name(source_.get(), i));
    gguf_add_tensor(target_.get(), tensor);
    if (part == Part::kOther) continue;
    ++widened;
    if (widened <= 3) report_.expert_bytes += ggml_nbytes(tensor) / static_cast<uint64_t>(ne[2]);
  }
  if (widened == 0 || widened % 3 != 0) {
    return not_supported(
        "its experts are not gated FFNs of three matrices (ffn_gate_exps, ffn_up_exps, ffn_down_exps)");
  }
  return {};
}

Status Widener::read_at(uint64_t offset, std::span<uint8_t> to) {
  if (to.empty()) return {};  // its pointer may be null, which the C library must not get
  const bool there = fseeko(in_.get(), static_cast<off_t>(offset), SEEK_SET) == 0 &&
                     std::fread(to.data(), 1, to.size(), in_.get()) == to.size();
  if (there) return {};
  return Error{ErrorCode::kIo, fmt::format("{}: cannot be read", from_)};
}

Status Widener::put(std::FILE* out, std::span<const uint8_t> bytes) const {
  if (bytes.empty()) return {};  // as above
  if (std::fwrite(bytes.data(), 1, bytes.size(), out) == bytes.size()) return {};
  return Error{ErrorCode::kIo, "the widened model cannot be written: is the disk full?"};
}

// A Q8_0 block is an f16 scale and 32 whole numbers: dividing it divides the scale.
void Widener::scale_blocks(const uint8_t* row, size_t bytes, float scale, std::vector<uint8_t>& to) {
  const size_t block = ggml_type_size(GGML_TYPE_Q8_0);
  const size_t begin = to.size();
  to.insert(to.end(), row, row + bytes);
  for (size_t at = begin; at < to.size(); at += block) {
    ggml_fp16_t half = 0;
    std::memcpy(&half, &to[at], sizeof(half));
    const float wanted = ggml_fp16_to_fp32(half) * scale;
    half = ggml_fp32_to_fp16(wanted);
    if (ggml_fp16_to_fp32(half) != wanted) ++report_.inexact;
    std::memcpy(&to[at], &half, sizeof(half));
  }
}

// Appends one row, multiplied by `scale`, in the target's type.
void Widener::convert_row(ggml_type source, const uint8_t* row, int64_t columns, float scale,
                          std::vector<uint8_t>& to) {
  const size_t bytes = ggml_row_size(source, columns);
  if (source == GGML_TYPE_Q8_0 && type_.type == GGML_TYPE_Q8_0) return scale_blocks(row, bytes, scale, to);
  const auto n = static_cast<size_t>(columns);
  values_.resize(n);
  if (source == GGML_TYPE_F32) {
    std::memcpy(values_.data(), row, bytes);
  } else {
    ggml_get_type_traits(source)->to_float(row, values_.data(), columns);
  }
  const size_t begin = to.size();
  to.resize(begin + ggml_row_size(type_.type, columns));
  if (type_.type == GGML_TYPE_F32) {
    for (float& value : values_) value *= scale;
    std::memcpy(&to[begin], values_.data(), n * sizeof(float));
    return;
  }
  // First to the target's type, then divided: so the weights are those of factor 1, exactly divided.
  const ggml_type_traits* traits = ggml_get_type_traits(type_.type);
  traits->from_float_ref(values_.data(), &to[begin], columns);
  if (scale == 1) return;
  if (type_.type == GGML_TYPE_Q8_0) {
    std::vector<uint8_t> unscaled(to.begin() + static_cast<ptrdiff_t>(begin), to.end());
    to.resize(begin);
    return scale_blocks(unscaled.data(), unscaled.size(), scale, to);
  }
  traits->to_float(&to[begin], values_.data(), columns);
  for (float& value : values_) value *= scale;
  traits->from_float_ref(values_.data(), &to[begin], columns);
  back_.resize(n);
  traits->to_float(&to[begin], back_.data(), columns);
  for (size_t i = 0; i < n; ++i) report_.inexact += back_[i] != values_[i] ? 1 : 0;
}

Status Widener::widen_expert(std::FILE* out, int64_t i, uint64_t expert) {
  const ggml_type source = gguf_get_tensor_type(source_.get(), i);
  const int64_t* ne = gguf_get_tensor_ne(source_.get(), i);
  const bool down = part_of(gguf_get_tensor_name(source_.get(), i)) == Part::kOut;
  const size_t row_bytes = ggml_row_size(source, ne[0]);
  matrix_.resize(row_bytes * static_cast<size_t>(ne[1]));
  const uint64_t at = gguf_get_data_offset(source_.get()) + gguf_get_tensor_offset(source_.get(), i);
  if (Status read = read_at(at + expert * matrix_.size(), matrix_); !read) return read;
  const float scale = down ? 1.0F / static_cast<float>(options_.factor) : 1.0F;
  row_.clear();
  for (int64_t r = 0; r < ne[1]; ++r) {
    const size_t begin = row_.size();
    convert_row(source, matrix_.data() + static_cast<size_t>(r) * row_bytes, ne[0], scale, row_);
    if (!down) continue;
    const std::vector<uint8_t> converted(row_.begin() + static_cast<ptrdiff_t>(begin), row_.end());
    for (uint32_t f = 1; f < options_.factor; ++f) row_.insert(row_.end(), converted.begin(), converted.end());
  }
  const uint32_t times = down ? 1 : options_.factor;
  for (uint32_t f = 0; f < times; ++f) {
    if (Status written = put(out, row_); !written) return written;
  }
  return {};
}

Status Widener::write_tensor(std::FILE* out, int64_t i) {
  const Part part = part_of(gguf_get_tensor_name(source_.get(), i));
  if (part == Part::kOther) {
    matrix_.resize(gguf_get_tensor_size(source_.get(), i));
    const uint64_t at = gguf_get_data_offset(source_.get()) + gguf_get_tensor_offset(source_.get(), i);
    if (Status read = read_at(at, matrix_); !read) return read;
    if (Status written = put(out, matrix_); !written) return written;
  } else {
    const auto experts = static_cast<uint64_t>(gguf_get_tensor_ne(source_.get(), i)[2]);
    for (uint64_t e = 0; e < experts; ++e) {
      if (Status written = widen_expert(out, i, e); !written) return written;
    }
  }
  const size_t alignment = gguf_get_alignment(target_.get());
  const std::vector<uint8_t> padding((alignment - gguf_get_tensor_size(target_.get(), i) % alignment) % alignment, 0);
  return put(out, padding);
}

Status Widener::write(const std::string& to) {
  const File out(std::fopen(to.c_str(), "wb"));
  if (!out) return Error{ErrorCode::kIo, fmt::format("{}: cannot be written", to)};
  std::vector<uint8_t> head(gguf_get_meta_size(target_.get()));
  gguf_get_meta_data(target_.get(), head.data());
  if (Status written = put(out.get(), head); !written) return written;
  const auto count = static_cast<size_t>(gguf_get_n_tensors(source_.get()));
  for (size_t i = 0; i < count; ++i) {
    if (Status written = write_tensor(out.get(), static_cast<int64_t>(i)); !written) return written;
    if (options_.progress) options_.progress(i + 1, count);
  }
  if (std::fflush(out.get()) != 0) return Error{ErrorCode::kIo, fmt::format("{}: cannot be written", to)};
  return {};
}

const WidenedType* find_widened_type(std::string_view name) {
  const auto* found = std::find_if(kWidenedTypes.begin(), kWidenedTypes.end(),
                                   [&](const WidenedType& each) { return name == each.name; });
  return found == kWidenedTypes.end() ? nullptr : found;
}

}  // namespace

std::vector<std::string> widened_types() {
  std::vector<std::string> names;
  for (const WidenedType& each : kWidenedTypes) names.emplace_back(each.name);
  return names;
}

Result<WidenReport> widen_gguf(const std::string& from, const std::string& to, const WidenOptions& options) {
  const WidenedType* type = find_widened_type(options.type);
  if (type == nullptr) {
    return invalid(fmt::format("type: got '{}', accepted: {}", options.type, fmt::join(widened_types(), ", ")), "type");
  }
  if (!std::has_single_bit(options.factor) || options.factor > kMostFactor) {
    return invalid(
        fmt::format("factor: got {}, accepted: 1, 2, 4, 8, 16, 32, 64 (powers of two divide exactly)", options.factor),
        "factor");
  }
  const auto summary = inspect_gguf(from);
  if (!summary) return summary.error();
  std::error_code error;
  if (std::filesystem::equivalent(from, to, error)) return invalid(fmt::format("{}: is the file to read", to), "OUT");
  Widener widener(from, options, *type);
  if (Status read = widener.read_head(); !read) return std::move(read).error();
  if (Status built = widener.build_head(*summary); !built) return std::move(built).error();
  const std::string unfinished = to + ".tmp";
  if (Status written = widener.write(unfinished); !written) {
    std::filesystem::remove(unfinished, error);
    return std::move(written).error();
  }
  std::filesystem::rename(unfinished, to, error);
  if (error) return Error{ErrorCode::kIo, fmt::format("{}: {}", to, error.message())};
  return widener.report();
}

}  // namespace kindred::engine
