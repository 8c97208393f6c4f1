// The router's own metrics, `kindred_router_*`.
//
// Thread-safety: that of base/metrics.h.
#pragma once

#include <array>
#include <atomic>
#include <string>
#include <string_view>

#include "base/metrics.h"
#include "fleet/fleet.h"
#include "policy/shadow.h"
#include "policy/types.h"

namespace kindred::router {

// How a request ended, seen from the client.
enum class Outcome {
  kOk,
  kClientError,  // 4xx, the router's or a worker's
  kRejected,     // 429 or 503 of the router's own: a limit was reached
  kFailed,       // 5xx
  kCut,          // an error after the stream had begun
  kCancelled,    // the client left
};
std::string_view to_string(Outcome outcome);

class RouterMetrics {
 public:
  RouterMetrics();

  void request_done(Outcome outcome, int status);
  void retried(std::string_view leg);
  void fell_back(policy::FallbackReason reason);
  void engine_decided(policy::Reason reason);
  void shadow_decided(const policy::ShadowVerdict& verdict);
  void membership_error(std::string_view source);
  void reloaded(bool accepted);

  // With the gauges of the workers as they are now.
  // `engines`: of their engines, too.
  std::string render(const fleet::Fleet& fleet, bool engines = false);

 private:
  void render_load(const fleet::WorkerStatus& worker, const Labels& labels);
  void render_engine(const fleet::WorkerStatus& worker, const fleet::EngineStatus& engine);

  Registry registry_;  // first: the references below are into it
  std::array<Counter*, policy::kFallbackReasons> fallbacks_{};
  std::array<std::atomic<Counter*>, 32> engine_decisions_{};  // by reason, once they exist
  // Of request_done(), once they exist: [outcome][status - kLeastStatus].
  static constexpr size_t kOutcomes = 6, kLeastStatus = 100, kStatuses = 500;
  std::array<std::array<std::atomic<Counter*>, kStatuses>, kOutcomes> done_{};

 public:
  Histogram& ttft_s;
  Histogram& tpot_s;
  Histogram& prefill_decision_s;
  Histogram& decode_decision_s;
  Histogram& similarity;
  Histogram& band_size;
  Gauge& requests_in_flight;
  Counter& stream_events;
  Gauge& requests_waiting;
  Gauge& requests_limit;  // places
  Gauge& saturation;      // (served + waiting) / places
  Histogram& queue_s;
  Counter& preempted;
  Counter& bad_counts;
  Counter& leases_released;
  Counter& leases_stranded;  // left to their time to live
  Counter& leases_renewed;

  Counter& spans_exported;
  Counter& spans_dropped;

  Counter& refit_fits;     // installed
  Counter& refit_splits;   // newcomers that took half a cohort
  Counter& refit_merges;   // cohorts of workers that are gone
  Counter& refit_skipped;  // too few requests
  Counter& refit_failures;
  Counter& refit_dropped;  // requests that the window had no room for
  Histogram& loop_late_s;  // how much later than asked a timer of the router's loop fired
  Gauge& loop_late_max_s;

  Gauge& refit_running;
  Gauge& refit_window_requests;
  Gauge& refit_shift;  // of the last one
  Histogram& refit_s;
};

}  // namespace kindred::router
