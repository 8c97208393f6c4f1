#include "policy/hash_ring.h"

#include <blake2.h>

#include <algorithm>
#include <array>
#include <string>

#include "base/result.h"

namespace kindred::policy {

uint64_t blake2b_64(std::string_view bytes) {
  std::array<uint8_t, 8> digest{};
  const char* data = bytes.data() != nullptr ? bytes.data() : "";  // libb2 refuses null, even for no bytes
  const int failed = blake2b(digest.data(), data, nullptr, digest.size(), bytes.size(), 0);
  KINDRED_CHECK(failed == 0);
  uint64_t value = 0;
  for (const uint8_t byte : digest) value = value << 8 | byte;
  return value;
}

HashRing::HashRing(std::span<const std::string_view> urls, uint32_t vnodes) {
  points_.reserve(urls.size() * vnodes);
  std::string name;
  for (uint32_t w = 0; w < urls.size(); ++w) {
    for (uint32_t v = 0; v < vnodes; ++v) {
      name.assign(urls[w]);
      name += '#';
      name += std::to_string(v);
      points_.push_back({blake2b_64(name), w});
    }
  }
  std::sort(points_.begin(), points_.end());
}

size_t HashRing::locate(uint64_t hash) const {
  KINDRED_CHECK(!points_.empty());
  const auto at = std::lower_bound(points_.begin(), points_.end(), hash,
                                   [](const Point& point, uint64_t wanted) { return point.hash < wanted; });
  return at == points_.end() ? 0 : static_cast<size_t>(at - points_.begin());
}

}  // namespace kindred::policy
