// Widens the expert FFNs of a GGUF model without changing its function, so that a small model's experts
// exceed the cache and decoding becomes bound by memory, as on large models.
//
// With factor F each expert gets every neuron F times: the matrix of ffn_gate_exps and of ffn_up_exps is
// repeated below itself, each row of ffn_down_exps is repeated behind itself and divided by F. F is a power
// of two, so the division is exact but for numbers near the type's smallest (counted in the report).
// Outputs equal those of the model with the same weights at factor 1, up to the order of f32 additions.
//
// Only expert matrices are converted to `type`; all other tensors are copied as they are. From Q8_0 to
// f16 a weight keeps 11 of its up to 18 significant bits (f32 keeps all), and kernels for f16 do not
// quantise activations as those for Q8_0 do, so compare with factor 1 of the same type.
//
// Thread-safety: pure function; writes `to`.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/result.h"

namespace kindred::engine {

// Accepted by widen_gguf.
std::vector<std::string> widened_types();

struct WidenOptions {
  uint32_t factor = 4;  // 1, 2, 4 … 64
  std::string type = "f16";
  std::function<void(size_t done, size_t tensors)> progress = {};
};

struct WidenReport {
  uint32_t from_width = 0, to_width = 0;  // neurons of an expert
  uint64_t expert_bytes = 0;              // of one expert in one layer, all three matrices
  uint64_t inexact = 0;                   // weights (Q8_0: blocks of 32) that dividing by F changed
};

// Reads `from`, writes `to` (an unfinished file is not left behind). Experts must be gated FFNs without
// biases, their width stated as <architecture>.expert_feed_forward_length.
// Errors: those of inspect_gguf; kInvalid (factor, type, `to` is `from`, no experts or other ones), kIo.
Result<WidenReport> widen_gguf(const std::string& from, const std::string& to, const WidenOptions& options);

}  // namespace kindred::engine
