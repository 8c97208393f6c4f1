// Fitting the synthetic process (expert_process.h) to what is published of real models.
//
// Targets. ELDR (ATC 2026) reports that prefill and decode activations correlate at 0.70 to 0.92, and that batches of
// one domain activate 17 to 21 % fewer experts than mixed ones. Recorded decisions of gpt-oss-20b, 703 requests of
// AmanPriyanshu/GPT-OSS-MoE-ExpertFingerprinting, give the cosines between signatures, each less the mean of all, of
// the first half of a request's tokens and the second half of another's: 0.80 for the same request, 0.43 for
// another of its category, 0.00 across categories. And mixed batches of 8, 16 and 32 of them touch 0.85, 0.83 and 0.86
// of the experts that even use would (E (1 - (1 - k / E)^n)), which says how skewed experts are for all.
//
// Thread-safety: pure functions; deterministic.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <vector>

#include "base/result.h"
#include "sim/expert_process.h"

namespace kindred::sim {

struct ExpertStatistics {
  // Pearson's r over layers and experts of a domain's mean prefill and mean decode frequencies; mean over domains.
  double correlation = 0;
  // The same for each request: lower, since chance does not average out.
  double request_correlation = 0;
  struct Saving {
    uint32_t batch = 0;
    double same_domain = 0, mixed = 0;  // expected distinct experts a layer
    double share() const { return mixed > 0 ? 1 - same_domain / mixed : 0; }
  };
  std::array<Saving, 4> savings = {};                    // batches of kSavingBatches
  double saving = 0;                                     // the mean of their shares
  double of_even = 0;                                    // mixed over even use, mean over the first three batches
  double same_request = 0, same_domain = 0, across = 0;  // cosines, see above
};
inline constexpr std::array<uint32_t, 4> kSavingBatches = {8, 16, 32, 64};

// Of 64 prototypes a domain, whatever options.prototypes says; prompts of 256 tokens. Error: kInvalid, of the options.
Result<ExpertStatistics> measure_process(SyntheticOptions options);

struct CalibrationTarget {
  const char* name = nullptr;
  double least = 0, most = 0;  // what is published
  double aim = 0, tolerance = 1;
  double ExpertStatistics::*figure = nullptr;
};
// The five above.
std::vector<CalibrationTarget> published_targets();

struct Calibration {
  SyntheticOptions options;  // with base, domain, request, drift and phase fitted
  ExpertStatistics reached;
  double misfit = 0;  // root mean square of (reached - aim) / tolerance
};
// Changes base, domain, request, drift and phase alone. Takes about a quarter of a second an evaluation with 4 layers
// of 128 experts; layers are alike, so few are enough. Error: kInvalid, of the options.
Result<Calibration> calibrate_process(SyntheticOptions start, const std::vector<CalibrationTarget>& targets,
                                      int evaluations, const std::function<void(size_t, size_t)>& progress);

}  // namespace kindred::sim
