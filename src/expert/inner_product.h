// Inner products of signatures. Sums run in eight lanes, and the order is fixed, so results are equal on
// every machine that does not contract to FMA, and equal whether rows are taken one by one or together. Where the
// processor has AVX2, found out at run time, the same sums run twice as fast.
//
// Thread-safety: pure functions.
#pragma once

#include <cstddef>
#include <span>

namespace kindred::expert {

// Equal lengths.
float dot(std::span<const float> a, std::span<const float> b);

// out[k] = dot(a, rows[k]), each of a.size() numbers.
void dots(std::span<const float> a, std::span<const float* const> rows, std::span<float> out);

// out[k] = dot(a, row k of `rows`); `rows`: [out.size() * a.size()] row-major.
void dots(std::span<const float> a, std::span<const float> rows, std::span<float> out);

}  // namespace kindred::expert
