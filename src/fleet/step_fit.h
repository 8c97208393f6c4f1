// Learns how long decode steps take from what requests saw: policy::StepLaw for all workers together, and how much
// slower or faster than that each one is.
//
// An observation is one request: the mean time between its tokens, beside the mean number of distinct experts a layer
// and of requests that its worker had meanwhile. T is linear in both, so means are as good as steps.
//
// The three terms of the law move together in practice, and little, so they are fitted by ridge regression towards
// the prior law, stretched to the observed level: m = argmin sum (y / f - sum m_i z_i)^2 + ridge sum (m_i - k)^2, with
// f the prior's time, z_i the shares of its terms, k the mean of y / f; each m_i stays within a factor of 3 of k. Old
// observations fade (kRemembered). A worker's slowness is the mean of observed / predicted, held near 1 by
// kSlownessPrior observations, and within 1/8 to 8.
//
// Without observations it is the prior. Thread-safety: any thread.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <vector>

#include "policy/step_law.h"

namespace kindred::fleet {

class StepFit {
 public:
  static constexpr double kRemembered = 512;     // requests
  static constexpr double kSlownessPrior = 16;   // requests
  static constexpr double kSlownessWindow = 64;  // requests

  explicit StepFit(policy::StepLaw prior = {}) : prior_(prior), law_(prior) {}

  // Times that are not positive and finite are ignored. `worker` < kMostWorkers, or it is ignored, too.
  void observe(uint32_t worker, double experts, double requests, double step_s);

  policy::StepLaw law() const;
  double slowness(uint32_t worker) const;

  static constexpr uint32_t kMostWorkers = 65'536;

 private:
  static constexpr size_t kTerms = 3;
  struct Speed {
    double weight = 0, sum = 0;  // of observed / predicted
    double slowness() const;
  };

  void solve();

  const policy::StepLaw prior_;
  mutable std::mutex mutex_;
  policy::StepLaw law_;
  std::array<std::array<double, kTerms>, kTerms> squares_{};  // sum z z'
  std::array<double, kTerms> products_{};                     // sum z y / f
  double weight_ = 0, level_sum_ = 0;
  uint64_t seen_ = 0;
  std::vector<Speed> speeds_;  // by worker
};

}  // namespace kindred::fleet
