#include "fleet/step_fit.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace kindred::fleet {
namespace {

// Variance of an observation (3 % of the time) over that of a term (half of it).
constexpr double kRidge = 0.004;
constexpr double kMostStretch = 3;
constexpr double kMostSlowness = 8;
constexpr uint64_t kSolveEvery = 16;

// Of a positive definite system, by elimination.
template <size_t N>
std::array<double, N> solved(std::array<std::array<double, N>, N> a, std::array<double, N> b) {
  for (size_t i = 0; i < N; ++i) {
    for (size_t r = i + 1; r < N; ++r) {
      const double times = a[r][i] / a[i][i];
      for (size_t c = i; c < N; ++c) a[r][c] -= times * a[i][c];
      b[r] -= times * b[i];
    }
  }
  for (size_t i = N; i-- > 0;) {
    for (size_t c = i + 1; c < N; ++c) b[i] -= a[i][c] * b[c];
    b[i] /= a[i][i];
  }
  return b;
}

}  // namespace

double StepFit::Speed::slowness() const {
  return std::clamp((sum + kSlownessPrior) / (weight + kSlownessPrior), 1 / kMostSlowness, kMostSlowness);
}

void StepFit::observe(uint32_t worker, double experts, double requests, double step_s) {
  if (!(step_s > 0) || !std::isfinite(step_s) || worker >= kMostWorkers) return;
  if (!(experts >= 0) || !(requests >= 0) || !std::isfinite(experts) || !std::isfinite(requests)) return;
  const double f = prior_.step(experts, requests);
  if (!(f > 0)) return;
  const std::lock_guard lock(mutex_);
  if (worker >= speeds_.size()) speeds_.resize(worker + 1);
  Speed& speed = speeds_[worker];
  // What a worker of the mean speed would have taken.
  const double y = step_s / f / speed.slowness();
  if (seen_ == 0) level_sum_ = y, weight_ = 1;
  const std::array<double, kTerms> z = {prior_.fixed / f, prior_.per_expert * experts / f,
                                        prior_.per_request * requests / f};
  constexpr double kFade = 1 - 1 / kRemembered;
  for (size_t i = 0; i < kTerms; ++i) {
    for (size_t j = 0; j < kTerms; ++j) squares_[i][j] = kFade * squares_[i][j] + z[i] * z[j];
    products_[i] = kFade * products_[i] + z[i] * y;
  }
  weight_ = kFade * weight_ + 1;
  level_sum_ = kFade * level_sum_ + y;
  if (seen_++ % kSolveEvery == 0) solve();
  constexpr double kSpeedFade = 1 - 1 / kSlownessWindow;
  speed.weight = kSpeedFade * speed.weight + 1;
  speed.sum = kSpeedFade * speed.sum + step_s / law_.step(experts, requests);
}

void StepFit::solve() {
  const double level = level_sum_ / weight_;
  auto a = squares_;
  auto b = products_;
  for (size_t i = 0; i < kTerms; ++i) {
    a[i][i] += kRidge;
    b[i] += kRidge * level;
  }
  std::array<double, kTerms> stretch = solved(a, b);
  for (double& m : stretch) m = std::clamp(m, level / kMostStretch, level * kMostStretch);
  law_ = {.fixed = prior_.fixed * stretch[0],
          .per_expert = prior_.per_expert * stretch[1],
          .per_request = prior_.per_request * stretch[2]};
}

policy::StepLaw StepFit::law() const {
  const std::lock_guard lock(mutex_);
  return law_;
}

double StepFit::slowness(uint32_t worker) const {
  const std::lock_guard lock(mutex_);
  return worker < speeds_.size() ? speeds_[worker].slowness() : 1;
}

}  // namespace kindred::fleet
