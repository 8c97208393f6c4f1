// Paced steps: the engine computes real tokens with real experts, and each step is padded to the time that
// a profile gives for it, so that several workers on a few cores behave like as many machines. A paced
// worker says so in /v1/models and /metrics; figures from it must be marked.
//
//   T = step_us + prefill_tokens * prefill_us_per_token + batch * per_sequence_us
//       + expert_us * layers * mean over layers of |U_l|
//
// with `batch` the decoding sequences of the step and U_l the distinct experts that any token of the step
// selects in layer l (ELDR's a + b |U|). The mean is over the layers that the engine captures: all MoE
// layers but the model's last one, which is computed only for tokens with logits, so that its rows are
// complete for decoding tokens but not for prompts. `layers` is that of the modelled machine, so the last
// layer counts as the average of the others.
//
// Profiles are JSON; docs/pace-profile.md describes them.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "base/metrics.h"
#include "base/result.h"

namespace kindred::engine {

struct PaceProfile {
  std::string name, source;
  double step_us = 0, prefill_us_per_token = 0, per_sequence_us = 0;
  double expert_us = 0;  // per distinct expert and layer
  uint32_t layers = 1;

  // `distinct_experts`: mean over the captured layers.
  std::chrono::nanoseconds step_time(uint32_t prefill_tokens, uint32_t batch, double distinct_experts) const;
};

// A step waits for no more than this: cancellation and shutdown wait for the step.
inline constexpr std::chrono::milliseconds kLongestPacedStep{1000};

// Errors: kInvalid, naming the key and what is accepted; kIo, kNotFound from reading the file.
Result<PaceProfile> parse_pace_profile(std::string_view json);
Result<PaceProfile> load_pace_profile(const std::string& path);

class Sleeper {
 public:
  virtual ~Sleeper() = default;
  virtual void sleep_until(MonotonicTime time) = 0;
};

class SystemSleeper final : public Sleeper {
 public:
  void sleep_until(MonotonicTime time) override;
};

// Pads steps. A step begins where the one before it ended, unless the engine was idle in between: what is
// done between two steps (sampling, admission) is part of the next one, and oversleeping adds up to nothing.
//
// Thread-safety: none; belongs to the engine's thread.
class Pacer {
 public:
  // References must outlive the pacer.
  Pacer(PaceProfile profile, const Clock& clock, Sleeper& sleeper, Registry& metrics);

  // Before the batch is evaluated, and when there is nothing more to do.
  void begin_step();
  void idle() { running_ = false; }
  // After the batch is evaluated: waits until the step's time is over, at most kLongestPacedStep. A step
  // that took longer than its time is counted as an overrun, and so is one whose experts are unknown
  // (distinct_experts < 0): its figures are not the profile's.
  void end_step(uint32_t prefill_tokens, uint32_t batch, double distinct_experts);

 private:
  const PaceProfile profile_;
  const Clock& clock_;
  Sleeper& sleeper_;
  MonotonicTime begin_{}, end_{};
  bool running_ = false;  // no idle time since the last step
  Counter &steps_, &overruns_;
};

}  // namespace kindred::engine
