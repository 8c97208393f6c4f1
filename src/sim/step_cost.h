// What the cluster asks of a hardware model. ProfileCost answers from a measured profile (sim/step_time.h);
// LinearCost from a few numbers, so that results can be checked with pencil and paper.
//
// Unit: seconds. Thread-safety: const.
#pragma once

#include <numeric>
#include <utility>

#include "sim/step_time.h"

namespace kindred::sim {

class StepCost {
 public:
  virtual ~StepCost() = default;
  virtual double step_s(const StepShape& shape) const = 0;
  virtual double kv_transfer_s(double tokens) const = 0;  // over a link that nobody else uses
};

struct ProfileCost final : StepCost {
  explicit ProfileCost(Profile profile) : time(std::move(profile)) {}

  double step_s(const StepShape& shape) const override { return time.seconds(shape); }
  double kv_transfer_s(double tokens) const override {
    constexpr double kWholeLink = 1;
    return time.kv_transfer_s(static_cast<uint64_t>(tokens), kWholeLink);
  }

  StepTime time;
};

// step = host + per token of prefill + per distinct expert; nothing else costs anything.
struct LinearCost final : StepCost {
  double host_s = 0, prefill_token_s = 0, expert_s = 0, context_token_s = 0, kv_token_s = 0;

  double step_s(const StepShape& shape) const override {
    const double experts = std::accumulate(shape.experts.begin(), shape.experts.end(), 0.0);
    return host_s + prefill_token_s * shape.prefill_tokens + expert_s * experts +
           context_token_s * shape.decode_context_tokens;
  }
  double kv_transfer_s(double tokens) const override { return kv_token_s * tokens; }
};

}  // namespace kindred::sim
