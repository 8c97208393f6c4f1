// Inner products of signatures. Sums run in eight lanes, and the order is fixed, so results are equal on
// every machine that does not contract to FMA, and equal whether rows are taken one by one or together.
//
// Thread-safety: pure functions.
#pragma once

#include <cstddef>
#include <span>

namespace kindred::expert {

// Equal lengths.
float dot(std::span<const float> a, std::span<const float> b);

// out[k] = dot(a, row k of `rows`); `rows`: [out.size() * a.size()] row-major.
void dots(std::span<const float> a, std::span<const float> rows, std::span<float> out);

}  // namespace kindred::expert
