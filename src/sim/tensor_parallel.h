// Tensor parallelism within an engine: attention and dense products divided among `tensor` GPUs, and what it costs to
// put their parts together.
//
// Thread-safety: const.
#pragma once

#include <cstdint>

#include "sim/step_cost.h"

namespace kindred::sim {

// All-reduces, two a layer. The defaults are NCCL's between two H200 (AIConfigurator's performance data,
// ai-dynamo/aiconfigurator, Apache-2.0): 7 us for small messages, 270 GB/s for large ones.
struct TensorParallel {
  uint32_t tensor = 1;  // GPUs an engine, 1 or more
  double all_reduce_us = 7, all_reduce_bytes_per_us = 270'000;
};

// A step of an engine of so many GPUs. Experts are as the profile and the step's ranks say: expert parallelism divides
// them among all GPUs of all engines.
class TensorParallelCost final : public StepCost {
 public:
  TensorParallelCost(const Profile& profile, const TensorParallel& options);

  double step_s(const StepShape& shape) const override;
  double kv_transfer_s(double tokens) const override;
  const StepTime& time() const { return time_; }

 private:
  TensorParallel options_;
  StepTime time_;  // of a GPU's part
};

// Tokens of KV that one of `engines` engines holds beside dense weights and its GPUs' part of the experts; 0: they do
// not fit.
uint64_t engine_kv_tokens(const Profile& profile, uint32_t engines, uint32_t tensor);

}  // namespace kindred::sim
