// Expert counts: how often each expert of each MoE layer was selected for a request's prompt tokens.
//
// Thread-safety: plain values and pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace kindred::expert {

// What the rows and columns of counts mean. Two counts may be compared only if their shapes are equal.
struct ExpertShape {
  std::vector<uint32_t> layers;  // model layer index of each row, ascending
  uint32_t experts = 0;          // E, routed experts a layer
  uint32_t top_k = 0;            // experts selected per token

  size_t cells() const { return layers.size() * experts; }
  bool operator==(const ExpertShape&) const = default;
};

// [L, E] row-major. Invariant of a complete set: every row sums to tokens * top_k.
struct ExpertCounts {
  ExpertShape shape;
  uint64_t tokens = 0;
  std::vector<uint32_t> data;  // shape.cells() numbers

  ExpertCounts() = default;
  explicit ExpertCounts(ExpertShape of) : shape(std::move(of)), data(shape.cells(), 0) {}

  std::span<const uint32_t> row(size_t l) const { return {data.data() + l * shape.experts, shape.experts}; }
  void add(const ExpertCounts& other);  // same shape
  bool rows_sum_to_tokens() const;
};

// The wire form of a prefill reply (design: "Counts on the wire"), a JSON object:
//   {"v":1,"dtype":"u16"|"u32","layers":[…],"experts":E,"top_k":k,"tokens":T,
//    "data":"<base64, row-major little-endian>"}
// with "suffix" of the same fields for the tokens after the cached prefix, if given. dtype is u16 while
// every count fits, that is T <= 65,535.
std::string counts_to_json(const ExpertCounts& counts, const ExpertCounts* suffix = nullptr);

// Untrusted input: version, dtype, sizes and row sums are checked against each other and against
// `limit_cells` before anything is allocated. `json` needs simdjson padding behind it only if
// `padded`; otherwise it is copied. Unknown fields and "suffix" are ignored.
Result<ExpertCounts> counts_from_json(std::string_view json, bool padded = false, size_t limit_cells = 1U << 20);

}  // namespace kindred::expert
