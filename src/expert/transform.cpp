#include "expert/transform.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace kindred::expert {

std::string_view to_string(Transform transform) {
  switch (transform) {
    case Transform::kCount: return "count";
    case Transform::kCountIdf: return "count-idf";
    case Transform::kLogCount: return "log-count";
    case Transform::kBinary: return "binary";
    case Transform::kGate: return "gate";
    case Transform::kGateIdf: return "gate-idf";
  }
  return "";
}

std::string file_spelling(Transform transform) {
  std::string name(to_string(transform));
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

Result<Transform> parse_transform(std::string_view name) {
  std::string accepted;
  for (const Transform transform : kTransforms) {
    if (name == to_string(transform) || name == file_spelling(transform)) return transform;
    accepted += fmt::format("{}{}", accepted.empty() ? "" : ", ", to_string(transform));
  }
  return invalid(fmt::format("transform '{}'; accepted: {}", name, accepted), "transform");
}

void transform_cells(Transform transform, const PromptProfile& profile, std::span<const float> idf, size_t begin,
                     std::span<float> out) {
  const size_t size = out.size();
  KINDRED_CHECK(begin + size <= (uses_gates(transform) ? profile.gate.size() : profile.counts.size()));
  KINDRED_CHECK(!uses_idf(transform) || begin + size <= idf.size());
  const uint32_t* counts = profile.counts.data() + (uses_gates(transform) ? 0 : begin);
  const float* gate = profile.gate.data() + (uses_gates(transform) ? begin : 0);
  switch (transform) {
    case Transform::kCount:
      for (size_t i = 0; i < size; ++i) out[i] = static_cast<float>(counts[i]);
      break;
    case Transform::kCountIdf:
      for (size_t i = 0; i < size; ++i) out[i] = static_cast<float>(counts[i]) * idf[begin + i];
      break;
    case Transform::kLogCount:  // most counts of a short prompt are 0, and a logarithm is not cheap
      for (size_t i = 0; i < size; ++i) out[i] = counts[i] == 0 ? 0 : std::log1p(static_cast<float>(counts[i]));
      break;
    case Transform::kBinary:
      for (size_t i = 0; i < size; ++i) out[i] = counts[i] == 0 ? 0.0F : 1.0F;
      break;
    case Transform::kGate: std::copy_n(gate, size, out.begin()); break;
    case Transform::kGateIdf:
      for (size_t i = 0; i < size; ++i) out[i] = gate[i] * idf[begin + i];
      break;
  }
}

}  // namespace kindred::expert
