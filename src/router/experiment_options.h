// What a switchback experiment compares.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "policy/decode_policy.h"
#include "policy/prefill_policy.h"

namespace kindred::router {

struct ExperimentArm {
  std::string name;
  policy::PrefillPolicyOptions prefill;
  policy::DecodePolicyOptions decode;
};

struct ExperimentOptions {
  std::vector<ExperimentArm> arms;  // 2 to 8, the first is the control; empty: no experiment
  std::chrono::milliseconds slice_ms{30'000};
  std::chrono::milliseconds seam_ms{5'000};  // shorter than a slice
  uint64_t seed = 1;
  double level = 0.95;  // of the intervals
};

}  // namespace kindred::router
