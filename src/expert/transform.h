// The six ways to turn what a prompt shows of its experts into a vector, before mask and norm (ELDR,
// figure 7): count, count·idf, ln(1 + count), 1 if used, summed gate probability, that times idf.
//
// idf always comes from the counts: a softmax gives every expert some probability, so a document
// frequency of gates would be N everywhere.
//
// Thread-safety: pure functions.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/result.h"

namespace kindred::expert {

enum class Transform { kCount, kCountIdf, kLogCount, kBinary, kGate, kGateIdf };

inline constexpr std::array kTransforms = {Transform::kCount,  Transform::kCountIdf, Transform::kLogCount,
                                           Transform::kBinary, Transform::kGate,     Transform::kGateIdf};

// "count", "count-idf", "log-count", "binary", "gate", "gate-idf".
std::string_view to_string(Transform transform);
// The same with underscores, as cohort files spell it.
std::string file_spelling(Transform transform);
// Either spelling. Error: kInvalid, naming the accepted values.
Result<Transform> parse_transform(std::string_view name);

constexpr bool uses_gates(Transform transform) {
  return transform == Transform::kGate || transform == Transform::kGateIdf;
}
constexpr bool uses_idf(Transform transform) {
  return transform == Transform::kCountIdf || transform == Transform::kGateIdf;
}

// What is known of a request's prompt. Borrowed.
struct PromptProfile {
  std::span<const uint32_t> counts = {};  // [L * E]
  std::span<const float> gate = {};       // [L * E], or empty: not recorded
};

// Writes the transformed values of the cells [begin, begin + out.size()) to `out`. `idf`: [L * E], read
// only if uses_idf(); `profile.gate` must be there if uses_gates().
void transform_cells(Transform transform, const PromptProfile& profile, std::span<const float> idf, size_t begin,
                     std::span<float> out);

}  // namespace kindred::expert
