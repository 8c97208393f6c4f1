// Lists inside the string metadata of our safetensors files, as JSON. Untrusted input.
//
// Thread-safety: pure functions. Errors: kInvalid, naming the key.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "base/safetensors.h"
#include "expert/counts.h"

namespace kindred::expert {

// Absent: empty.
Result<std::vector<uint32_t>> metadata_indices(const Safetensors& file, std::string_view key);
Result<std::vector<double>> metadata_reals(const Safetensors& file, std::string_view key);
Result<std::vector<std::string>> metadata_strings(const Safetensors& file, std::string_view key);

std::string to_json(std::span<const uint32_t> indices);
std::string to_json(std::span<const double> reals);
std::string to_json(std::span<const std::string> strings);

// The shape, if it is one: layers ascending and not empty, 0 < top_k <= experts, and no more cells than
// any model needs.
Result<ExpertShape> checked_shape(ExpertShape shape);

inline constexpr size_t kMaxCells = 1U << 20;  // layers x experts: 128 layers of 8,192 experts

}  // namespace kindred::expert
