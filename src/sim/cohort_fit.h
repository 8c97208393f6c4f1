// Cohorts for the policies that look at experts, fitted as `kindred fit` does, on requests that are not simulated:
// a calibration draw from the same source.
//
// Thread-safety: pure functions.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "expert/activations.h"
#include "expert/cohorts.h"
#include "sim/tape.h"

namespace kindred::sim {

struct CalibrationRequest {
  RequestExperts experts;
  uint32_t decode_tokens = 1;  // of its tape, to be counted
};

// Of the first `tokens` that a request decodes, around its tape.
expert::ExpertCounts decoded_counts(const RequestExperts& experts, const expert::ExpertShape& shape, uint32_t tokens);

// As `record` would have recorded them. Error: kInvalid: requests of different models.
Result<expert::Activations> record_activations(std::span<const CalibrationRequest> requests,
                                               const std::string& model_fingerprint = {});

struct FittedCohorts {
  std::shared_ptr<const expert::CohortModel> model;
  double rho = 0;             // of the layer mask
  double active_experts = 0;  // a layer, expected in a batch of one cohort's requests
  double active_random = 0;   // in one of any requests
  uint32_t batch = 0;         // of both
};
// One cohort per decode worker. Error: that of expert::fit_cohorts.
Result<FittedCohorts> fit_for(const expert::Activations& calibration, uint32_t decode_workers, uint64_t seed);

}  // namespace kindred::sim
