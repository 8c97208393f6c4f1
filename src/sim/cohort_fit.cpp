#include "sim/cohort_fit.h"

#include <bit>

#include "expert/fit.h"

namespace kindred::sim {

expert::ExpertCounts decoded_counts(const RequestExperts& experts, const expert::ExpertShape& shape, uint32_t tokens) {
  expert::ExpertCounts out(shape);
  out.tokens = tokens;
  const ExpertTape& tape = *experts.decode;
  for (uint32_t t = 0; t < tokens; ++t) {
    const std::span<const uint64_t> row = tape.token((experts.first + t) % tape.tokens());
    for (size_t w = 0; w < row.size(); ++w) {
      uint32_t* const counts = out.data.data() + w / tape.words() * shape.experts + w % tape.words() * 64;
      for (uint64_t left = row[w]; left != 0; left &= left - 1) ++counts[std::countr_zero(left)];
    }
  }
  return out;
}

Result<expert::Activations> record_activations(std::span<const CalibrationRequest> requests,
                                               const std::string& model_fingerprint) {
  expert::Activations out;
  out.model = "simulated";
  out.model_fingerprint = model_fingerprint;
  for (const CalibrationRequest& request : requests) {
    const expert::ExpertCounts& prompt = *request.experts.prompt;
    const expert::ExpertCounts decode = decoded_counts(request.experts, prompt.shape, request.decode_tokens);
    const Status added = out.append(prompt, &decode, std::to_string(request.experts.domain));
    if (!added) return added.error();
  }
  return out;
}

Result<FittedCohorts> fit_for(const expert::Activations& calibration, uint32_t decode_workers, uint64_t seed) {
  expert::FitOptions options;
  options.workers = decode_workers;
  options.seed = seed;
  Result<expert::FitReport> fitted = expert::fit_cohorts(calibration, options);
  if (!fitted) return std::move(fitted).error();
  FittedCohorts out;
  out.rho = fitted->mask.peak_rho();
  out.active_experts = fitted->active_experts;
  out.active_random = fitted->active_random;
  out.batch = fitted->batch;
  out.model = std::make_shared<const expert::CohortModel>(std::move(fitted->model));
  return out;
}

}  // namespace kindred::sim
