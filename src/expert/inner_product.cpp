#include "expert/inner_product.h"

#include <array>
#include <cstring>

#include "base/result.h"

namespace kindred::expert {
namespace {

// Four sums side by side, an SSE or NEON register. A GCC and Clang extension, since loops over arrays of
// sums are not vectorised reliably, and wider vectors than the target has go through memory.
using Quad = float __attribute__((vector_size(16)));
constexpr size_t kProductLanes = 8;  // two quads

Quad load(const float* from) {
  Quad out;
  std::memcpy(&out, from, sizeof(out));
  return out;
}

// `Rows` inner products at once. One alone waits for its own additions, each 4 cycles after the other;
// four keep the adders busy.
template <size_t Rows>
void dot_block(const float* a, const float* rows, size_t size, float* out) {
  std::array<Quad, Rows> low{}, high{};
  size_t i = 0;
  for (; i + kProductLanes <= size; i += kProductLanes) {
    const Quad x = load(a + i), y = load(a + i + 4);
    for (size_t r = 0; r < Rows; ++r) {
      low[r] += x * load(rows + r * size + i);
      high[r] += y * load(rows + r * size + i + 4);
    }
  }
  for (size_t r = 0; r < Rows; ++r) {
    Quad &l = low[r], &h = high[r];
    for (size_t at = i; at < size; ++at) (at - i < 4 ? l : h)[(at - i) % 4] += a[at] * rows[r * size + at];
    out[r] = ((l[0] + h[0]) + (l[1] + h[1])) + ((l[2] + h[2]) + (l[3] + h[3]));
  }
}

}  // namespace

float dot(std::span<const float> a, std::span<const float> b) {
  KINDRED_CHECK(a.size() == b.size());
  float out = 0;
  dot_block<1>(a.data(), b.data(), a.size(), &out);
  return out;
}

void dots(std::span<const float> a, std::span<const float> rows, std::span<float> out) {
  KINDRED_CHECK(rows.size() == out.size() * a.size());
  size_t k = 0;
  for (; k + 4 <= out.size(); k += 4) dot_block<4>(a.data(), rows.data() + k * a.size(), a.size(), out.data() + k);
  for (; k < out.size(); ++k) dot_block<1>(a.data(), rows.data() + k * a.size(), a.size(), out.data() + k);
}

}  // namespace kindred::expert
