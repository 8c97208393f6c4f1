// A running switchback experiment: which arm is in force, and what each arm did.
//
// Throughput is stream events relayed per second; active experts are read from the metrics of Kindred's decode
// workers (mean per step and layer). Both over the slice behind its seam.
//
// Ownership: held by the core, which outlives it.
// Thread-safety: any thread, but for watch(), which is the control loop's.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/json.h"
#include "net/task.h"
#include "policy/decode_policy.h"
#include "policy/prefill_policy.h"
#include "router/experiment_ledger.h"
#include "router/experiment_options.h"

namespace kindred::router {

class Core;
class Exchange;

class Experiment {
 public:
  // `clock` is borrowed. Error: kInvalid, naming `experiment` or the option of an arm.
  static Result<std::unique_ptr<Experiment>> make(const ExperimentOptions& options, const Clock& clock);

  // Policies that stand for those of the arms; they refer to this object.
  std::unique_ptr<policy::PrefillPolicy> prefill_policy();
  std::unique_ptr<policy::DecodePolicy> decode_policy();
  std::unique_ptr<policy::DecodePolicy> plain_policy();

  uint32_t arm() const { return ledger_.arm_at(now_s()); }
  // A request whose answer has ended.
  void finished(const Exchange& exchange);
  Json report() const;

  // Measures slice after slice until the router closes.
  static net::Task<void> watch(std::shared_ptr<Core> core);

 private:
  struct Policies {
    std::vector<std::unique_ptr<policy::PrefillPolicy>> prefill;
    std::vector<std::unique_ptr<policy::DecodePolicy>> decode, plain;
  };

  Experiment(ExperimentPlan plan, Policies policies, const Clock& clock)
      : clock_(clock), started_(clock.now()), ledger_(std::move(plan)), policies_(std::move(policies)) {}

  double now_s() const { return seconds_between(started_, clock_.now()); }

  const Clock& clock_;
  const MonotonicTime started_;
  mutable std::mutex mutex_;  // guards what the ledger has seen; plan and schedule do not change
  ExperimentLedger ledger_;
  Policies policies_;  // until they are handed out
};

}  // namespace kindred::router
