#include "expert/inclusion.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace kindred::expert {
namespace {

constexpr double kUnitsPerNat = 4096;
constexpr uint32_t kSteps = 4096;     // of p, where codes are looked up
constexpr uint32_t kLowSteps = 256;   // exp is a product of two table entries: of the low byte, and of the rest
constexpr uint32_t kHighSteps = 256;  // sums of 65,536 units and more are 0: e^-16
constexpr uint32_t kLinearUnits = 16'129;

struct Tables {
  std::array<uint32_t, 256> units{};
  std::array<float, 256> probability{};
  std::array<uint8_t, kSteps + 1> code{};  // nearest, by p
  std::array<float, kLowSteps> low{};
  std::array<float, kHighSteps> high{};

  Tables() {
    for (uint32_t c = 0; c < 256; ++c) {
      const double part = c / 255.0;
      units[c] = c + static_cast<uint32_t>(std::lround(kLinearUnits * part * part * part));
      probability[c] = static_cast<float>(-std::expm1(-static_cast<double>(units[c]) / kUnitsPerNat));
    }
    uint32_t at = 0;
    for (uint32_t step = 0; step <= kSteps; ++step) {
      const auto p = static_cast<float>(static_cast<double>(step) / kSteps);
      while (at < 255 && probability[at + 1] - p < p - probability[at]) ++at;
      code[step] = static_cast<uint8_t>(at);
    }
    for (uint32_t i = 0; i < kLowSteps; ++i)
      low[i] = static_cast<float>(std::exp(-static_cast<double>(i) / kUnitsPerNat));
    for (uint32_t i = 0; i < kHighSteps; ++i) {
      high[i] = static_cast<float>(std::exp(-static_cast<double>(kLowSteps) * i / kUnitsPerNat));
    }
  }
};

const Tables& tables() {
  static const Tables all;
  return all;
}

void pack_counted(const ExpertCounts& counts, std::span<uint8_t> out) {
  const Tables& table = tables();
  // Fixed point with 40 bits behind the point: a division a cell would cost more than all the rest.
  const uint64_t scale = ((static_cast<uint64_t>(kSteps) << 40) + counts.tokens / 2) / counts.tokens;
  constexpr uint64_t kHalf = 1ULL << 39;
  for (size_t i = 0; i < out.size(); ++i) {
    const uint64_t step = (counts.data[i] * scale + kHalf) >> 40;
    out[i] = table.code[std::min<uint64_t>(step, kSteps)];
  }
}

void pack_sharpened(const ExpertCounts& counts, double sharpen, std::span<uint8_t> out) {
  const Tables& table = tables();
  const size_t experts = counts.shape.experts;
  std::vector<double> raised(experts);
  for (size_t l = 0; l < counts.shape.layers.size(); ++l) {
    const std::span<const uint32_t> row = counts.row(l);
    double sum = 0;
    for (size_t e = 0; e < experts; ++e) {
      sum += raised[e] = std::pow(static_cast<double>(row[e]) / static_cast<double>(counts.tokens), sharpen);
    }
    const double scale = sum > 0 ? counts.shape.top_k / sum : 0;
    for (size_t e = 0; e < experts; ++e) {
      const double p = std::min(1.0, raised[e] * scale);
      out[l * experts + e] = table.code[static_cast<size_t>(std::lround(p * kSteps))];
    }
  }
}

}  // namespace

Inclusion pack_inclusion(const ExpertCounts& counts, double sharpen) {
  KINDRED_CHECK(counts.tokens > 0);
  Inclusion out{.shape = counts.shape, .codes = std::vector<uint8_t>(counts.data.size())};
  if (sharpen == 1) pack_counted(counts, out.codes);
  else pack_sharpened(counts, sharpen, out.codes);
  return out;
}

void unpack_inclusion(std::span<const uint8_t> codes, std::span<float> out) {
  KINDRED_CHECK(codes.size() == out.size());
  const std::array<float, 256>& probability = tables().probability;
  for (size_t i = 0; i < codes.size(); ++i) out[i] = probability[codes[i]];
}

void add_inclusion(std::span<const uint8_t> codes, int32_t times, std::span<uint32_t> sums) {
  KINDRED_CHECK(codes.size() == sums.size());
  const std::array<uint32_t, 256>& units = tables().units;
  for (size_t i = 0; i < codes.size(); ++i) sums[i] += units[codes[i]] * static_cast<uint32_t>(times);
}

double unused_shares(std::span<const uint32_t> sums, std::span<float> out) {
  KINDRED_CHECK(sums.size() == out.size());
  const Tables& table = tables();
  double used = 0;
  for (size_t i = 0; i < sums.size(); ++i) {
    const uint32_t high = sums[i] / kLowSteps;
    out[i] = high < kHighSteps ? table.high[high] * table.low[sums[i] % kLowSteps] : 0.0F;
    used += 1 - static_cast<double>(out[i]);
  }
  return used;
}

}  // namespace kindred::expert
