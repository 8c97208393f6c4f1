#include "policy/switchback.h"

#include <boost/math/distributions/students_t.hpp>
#include <cmath>
#include <numeric>

#include "base/result.h"
#include "base/rng.h"

namespace kindred::policy {

std::vector<uint32_t> SwitchbackSchedule::order_of(uint64_t block) const {
  std::vector<uint32_t> order(arms_);
  std::iota(order.begin(), order.end(), 0U);
  Rng rng(mix64(seed_) ^ mix64(block + 1));
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[rng.below(i)]);
  return order;
}

double students_t(double level, size_t degrees) {
  KINDRED_CHECK(level > 0 && level < 1 && degrees > 0);
  return boost::math::quantile(boost::math::students_t(static_cast<double>(degrees)), 0.5 + level / 2);
}

std::optional<PairedEstimate> paired_difference(std::span<const std::pair<double, double>> blocks, double level) {
  const size_t count = blocks.size();
  if (count < 2) return std::nullopt;
  const auto n = static_cast<double>(count);
  PairedEstimate out;
  out.blocks = count;
  for (const auto& [control, arm] : blocks) {
    out.control += control / n;
    out.arm += arm / n;
  }
  out.difference = out.arm - out.control;
  double squares = 0;
  for (const auto& [control, arm] : blocks) squares += std::pow(arm - control - out.difference, 2);
  const double half = students_t(level, count - 1) * std::sqrt(squares / (n - 1) / n);
  out.low = out.difference - half;
  out.high = out.difference + half;
  out.claimed = count >= kMinBlocks && (out.low > 0 || out.high < 0);
  return out;
}

}  // namespace kindred::policy
