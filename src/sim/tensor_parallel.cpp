#include "sim/tensor_parallel.h"

#include <cmath>

namespace kindred::sim {
namespace {

// Products whose output is divided, and those whose input is; the gate and the experts' exchange are whole.
Profile part_of(Profile profile, uint32_t tensor) {
  for (Projection& projection : profile.projections) {
    if (projection.name == "output") projection.k /= tensor;
    else if (projection.name != "gate") projection.n /= tensor;
  }
  profile.attention.decode.token_us /= tensor;
  profile.attention.decode_window.token_us /= tensor;
  profile.attention.prefill_us_per_context /= tensor;
  return profile;
}

}  // namespace

TensorParallelCost::TensorParallelCost(const Profile& profile, const TensorParallel& options)
    : options_(options), time_(part_of(profile, options.tensor)) {}

double TensorParallelCost::step_s(const StepShape& shape) const {
  double out = time_.seconds(shape);
  if (options_.tensor > 1) {
    constexpr double kAllReducesALayer = 2, kBytesAValue = 2, kUsPerS = 1e6;
    const ModelDims& dims = time_.profile().dims;
    const double bytes = kBytesAValue * dims.hidden * (shape.prefill_tokens + shape.decode_requests);
    out +=
        kAllReducesALayer * dims.layers * (options_.all_reduce_us + bytes / options_.all_reduce_bytes_per_us) / kUsPerS;
  }
  return out;
}

double TensorParallelCost::kv_transfer_s(double tokens) const {
  constexpr double kWholeLink = 1;
  return time_.kv_transfer_s(static_cast<uint64_t>(tokens), kWholeLink);
}

uint64_t engine_kv_tokens(const Profile& profile, uint32_t engines, uint32_t tensor) {
  const MemoryFigures& memory = profile.memory;
  const double left = tensor * memory.usable_share * memory.hbm_bytes - memory.dense_weight_bytes -
                      memory.expert_weight_bytes / engines;
  return left > 0 ? static_cast<uint64_t>(left / memory.kv_bytes_per_token) : 0;
}

}  // namespace kindred::sim
