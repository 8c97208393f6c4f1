// Bounds that several options of `kindred router` share.
#pragma once

#include <cstdint>

namespace kindred::cli {

inline constexpr int64_t kDayMs = 86'400'000;

}  // namespace kindred::cli
