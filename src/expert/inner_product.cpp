#include "expert/inner_product.h"

#include <array>
#include <cstring>
#include <vector>

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
void dot_block(const float* a, const float* const* rows, size_t size, float* out) {
  std::array<Quad, Rows> low{}, high{};
  size_t i = 0;
  for (; i + kProductLanes <= size; i += kProductLanes) {
    const Quad x = load(a + i), y = load(a + i + 4);
    for (size_t r = 0; r < Rows; ++r) {
      low[r] += x * load(rows[r] + i);
      high[r] += y * load(rows[r] + i + 4);
    }
  }
  for (size_t r = 0; r < Rows; ++r) {
    Quad &l = low[r], &h = high[r];
    for (size_t at = i; at < size; ++at) (at - i < 4 ? l : h)[(at - i) % 4] += a[at] * rows[r][at];
    out[r] = ((l[0] + h[0]) + (l[1] + h[1])) + ((l[2] + h[2]) + (l[3] + h[3]));
  }
}

#if defined(__x86_64__)
// The same sums in the same order, both quads in one register: twice as fast where there is AVX2. Without FMA, which
// rounds once where others round twice.
using Oct = float __attribute__((vector_size(32)));

template <size_t Rows>
__attribute__((target("avx2"))) void dot_block_avx2(const float* a, const float* const* rows, size_t size, float* out) {
  std::array<Oct, Rows> sums{};
  size_t i = 0;
  for (; i + kProductLanes <= size; i += kProductLanes) {
    Oct x;
    std::memcpy(&x, a + i, sizeof(x));
    for (size_t r = 0; r < Rows; ++r) {
      Oct y;
      std::memcpy(&y, rows[r] + i, sizeof(y));
      sums[r] += x * y;
    }
  }
  for (size_t r = 0; r < Rows; ++r) {
    Oct& s = sums[r];
    for (size_t at = i; at < size; ++at) s[at - i] += a[at] * rows[r][at];
    out[r] = ((s[0] + s[4]) + (s[1] + s[5])) + ((s[2] + s[6]) + (s[3] + s[7]));
  }
}
#endif

struct Kernels {
  using Block = void (*)(const float*, const float* const*, size_t, float*);
  Block one = dot_block<1>, four = dot_block<4>;
};

const Kernels& kernels() {
  static const Kernels chosen = [] {
    Kernels out;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) out = {.one = dot_block_avx2<1>, .four = dot_block_avx2<4>};
#endif
    return out;
  }();
  return chosen;
}

}  // namespace

float dot(std::span<const float> a, std::span<const float> b) {
  KINDRED_CHECK(a.size() == b.size());
  float out = 0;
  const float* const row = b.data();
  kernels().one(a.data(), &row, a.size(), &out);
  return out;
}

void dots(std::span<const float> a, std::span<const float* const> rows, std::span<float> out) {
  KINDRED_CHECK(rows.size() == out.size());
  size_t k = 0;
  for (; k + 4 <= out.size(); k += 4) kernels().four(a.data(), rows.data() + k, a.size(), out.data() + k);
  for (; k < out.size(); ++k) kernels().one(a.data(), rows.data() + k, a.size(), out.data() + k);
}

void dots(std::span<const float> a, std::span<const float> rows, std::span<float> out) {
  KINDRED_CHECK(rows.size() == out.size() * a.size());
  std::vector<const float*> each(out.size());
  for (size_t k = 0; k < each.size(); ++k) each[k] = rows.data() + k * a.size();
  dots(a, each, out);
}

}  // namespace kindred::expert
