#include "router/router_metrics.h"

#include <fmt/format.h>

#include <limits>
#include <optional>

namespace kindred::router {
namespace {

constexpr std::array<double, 12> kSimilarityBounds = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1};
constexpr std::array<double, 9> kBandBounds = {1, 2, 3, 4, 6, 8, 12, 16, 32};

constexpr std::string_view kDecisionName = "kindred_router_decision_seconds";
constexpr std::string_view kDecisionHelp = "Time to choose a worker, reading expert counts included.";

}  // namespace

std::string_view to_string(Outcome outcome) {
  switch (outcome) {
    case Outcome::kOk: return "ok";
    case Outcome::kClientError: return "client_error";
    case Outcome::kRejected: return "rejected";
    case Outcome::kFailed: return "failed";
    case Outcome::kCut: return "cut";
    case Outcome::kCancelled: return "cancelled";
  }
  return "?";
}

RouterMetrics::RouterMetrics()
    : ttft_s(registry_.histogram("kindred_router_ttft_seconds",
                                 "From the request's arrival to the first event sent to the client.",
                                 latency_bounds_s())),
      tpot_s(registry_.histogram("kindred_router_tpot_seconds",
                                 "Mean time between the events of a stream after its first, per request.",
                                 latency_bounds_s())),
      prefill_decision_s(registry_.histogram(kDecisionName, kDecisionHelp, decision_bounds_s(), {{"leg", "prefill"}})),
      decode_decision_s(registry_.histogram(kDecisionName, kDecisionHelp, decision_bounds_s(), {{"leg", "decode"}})),
      similarity(registry_.histogram("kindred_router_similarity",
                                     "Cosine of a request's signature to the cohort of the worker chosen.",
                                     kSimilarityBounds)),
      band_size(
          registry_.histogram("kindred_router_band_size", "Workers in the locality band of a request.", kBandBounds)),
      requests_in_flight(registry_.gauge("kindred_router_requests_in_flight", "Requests being served.")),
      stream_events(registry_.counter("kindred_router_stream_events_total", "Events of streams relayed to clients.")),
      requests_waiting(registry_.gauge("kindred_router_requests_waiting", "Requests waiting for a place.")),
      requests_limit(registry_.gauge("kindred_router_requests_limit", "Requests that may be served at once.")),
      saturation(registry_.gauge("kindred_router_saturation",
                                 "Requests served and waiting, as a part of those that may be served at once.")),
      queue_s(registry_.histogram("kindred_router_queue_seconds", "Time that requests waited which had to wait.",
                                  latency_bounds_s())),
      preempted(registry_.counter("kindred_router_preempted_total",
                                  "Batch requests that gave their place to an interactive one.")),
      bad_counts(registry_.counter("kindred_router_bad_counts_total",
                                   "Prefill replies whose expert counts did not pass their checks.")),
      leases_released(registry_.counter("kindred_router_leases_released_total", "KV leases released.")),
      leases_stranded(registry_.counter("kindred_router_leases_stranded_total",
                                        "KV leases whose release failed; they end with their time to live.")),
      leases_renewed(registry_.counter("kindred_router_leases_renewed_total", "Renewals of KV leases.")),
      spans_exported(registry_.counter("kindred_router_spans_exported_total", "Spans that the collector took.")),
      spans_dropped(registry_.counter("kindred_router_spans_dropped_total",
                                      "Spans for which there was no room, or that the collector did not take.")),
      refit_fits(registry_.counter("kindred_refit_fits_total", "Refits of the cohorts that were installed.")),
      refit_splits(registry_.counter("kindred_refit_splits_total", "Workers that took half of another's cohort.")),
      refit_merges(registry_.counter("kindred_refit_merges_total", "Cohorts given up because their worker is gone.")),
      refit_skipped(registry_.counter("kindred_refit_skipped_total", "Refits not made for lack of requests.")),
      refit_failures(registry_.counter("kindred_refit_failures_total", "Refits that failed; the old cohorts stay.")),
      refit_dropped(registry_.counter("kindred_refit_dropped_requests_total",
                                      "Requests that left the window early, for lack of room.")),
      loop_late_s(registry_.histogram("kindred_router_loop_late_seconds",
                                      "How much later than asked a timer of the router's loop fired.",
                                      latency_bounds_s())),
      loop_late_max_s(registry_.gauge("kindred_router_loop_late_max_seconds", "The longest of these so far.")),
      refit_running(registry_.gauge("kindred_refit_running", "1 while a refit runs.")),
      refit_window_requests(registry_.gauge("kindred_refit_window_requests", "Requests in the window.")),
      refit_shift(registry_.gauge("kindred_refit_shift",
                                  "Mean of 1 - cosine between old and new centroids at the last refit.")),
      refit_s(
          registry_.histogram("kindred_refit_seconds", "Time of a refit, off the request path.", latency_bounds_s())) {
  for (size_t i = 1; i < policy::kFallbackReasons; ++i) {
    const std::string reason(policy::to_string(static_cast<policy::FallbackReason>(i)));
    fallbacks_[i] = &registry_.counter("kindred_router_fallbacks_total",
                                       "Decode decisions made on load alone though the policy wanted experts.",
                                       {{"reason", reason}});
  }
}

void RouterMetrics::request_done(Outcome outcome, int status) {
  const auto row = static_cast<size_t>(outcome);
  const size_t column = static_cast<size_t>(status) - kLeastStatus;  // below it: far too large
  std::atomic<Counter*>* known = row < kOutcomes && column < kStatuses ? &done_[row][column] : nullptr;
  Counter* counter = known != nullptr ? known->load(std::memory_order_acquire) : nullptr;
  if (counter == nullptr) {
    // Two threads may both come here: the registry gives them the same.
    counter = &registry_.counter("kindred_router_requests_total", "Requests by how they ended for the client.",
                                 {{"outcome", std::string(to_string(outcome))}, {"status", fmt::format("{}", status)}});
    if (known != nullptr) known->store(counter, std::memory_order_release);
  }
  counter->add();
}

void RouterMetrics::retried(std::string_view leg) {
  registry_.counter("kindred_router_retries_total", "Legs tried on a further worker.", {{"leg", std::string(leg)}})
      .add();
}

void RouterMetrics::fell_back(policy::FallbackReason reason) {
  if (Counter* counter = fallbacks_[static_cast<size_t>(reason)]; counter != nullptr) counter->add();
}

void RouterMetrics::engine_decided(policy::Reason reason) {
  const auto at = static_cast<size_t>(reason);
  Counter* counter = at < engine_decisions_.size() ? engine_decisions_[at].load(std::memory_order_acquire) : nullptr;
  if (counter == nullptr) {
    // Two threads may both come here: the registry gives them the same.
    counter = &registry_.counter("kindred_router_engine_decisions_total", "Choices of an engine, by what settled them.",
                                 {{"reason", std::string(policy::to_string(reason))}});
    if (at < engine_decisions_.size()) engine_decisions_[at].store(counter, std::memory_order_release);
  }
  counter->add();
}

void RouterMetrics::membership_error(std::string_view source) {
  registry_
      .counter("kindred_router_membership_errors_total",
               "Lists of workers that could not be read or not be used whole.", {{"source", std::string(source)}})
      .add();
}

void RouterMetrics::reloaded(bool accepted) {
  registry_
      .counter("kindred_router_reloads_total", "New configurations, by what became of them.",
               {{"result", accepted ? "accepted" : "refused"}})
      .add();
}

void RouterMetrics::shadow_decided(const policy::ShadowVerdict& verdict) {
  registry_
      .counter("kindred_router_shadow_decisions_total", "Decisions of the shadow policy, by whether they were as made.",
               {{"agreed", verdict.agreed ? "yes" : "no"}})
      .add();
  registry_
      .histogram("kindred_router_shadow_decision_seconds", "Time the shadow policy took to decide.",
                 decision_bounds_s())
      .observe(verdict.took_s);
}

void RouterMetrics::render_engine(const fleet::WorkerStatus& worker, const fleet::EngineStatus& engine) {
  const Labels labels = {{"engine", fmt::to_string(engine.rank)}, {"worker", worker.spec.url}};
  const auto set = [&](std::string_view name, std::string_view help, double value) {
    registry_.gauge(name, help, labels).set(value);
  };
  const bool fresh = engine.trace == policy::TraceState::kFresh;
  set("kindred_router_engine_trace_fresh", "1 if what the engine said last is young enough to be used.", fresh ? 1 : 0);
  if (engine.trace_age_s >= 0) {
    set("kindred_router_engine_trace_age_seconds", "Age of what the engine said last.", engine.trace_age_s);
  }
  set("kindred_router_engine_score", "Pressure of an engine, in tokens, without the request's own; 0 without a trace.",
      fresh ? engine.pressure.score() : 0);
  set("kindred_router_engine_compensation_tokens",
      "Prompt tokens sent to an engine that its trace does not include yet.", engine.view.compensation_tokens);
  set("kindred_router_engine_in_flight", "Requests of this router at an engine; n choices count n.",
      engine.view.in_flight);
}

void RouterMetrics::render_load(const fleet::WorkerStatus& worker, const Labels& labels) {
  registry_
      .gauge("kindred_router_load_known", "1 if the worker's own report of its load is young enough to be used.",
             labels)
      .set(worker.load ? 1 : 0);
  const auto set = [&](std::string_view name, std::string_view help, const std::optional<double>& said) {
    // What is not known is not zero: nobody shall scale by it.
    if (worker.load_age_s < 0) return;
    registry_.gauge(name, help, labels).set(said.value_or(std::numeric_limits<double>::quiet_NaN()));
  };
  const fleet::LoadReport load = worker.load.value_or(fleet::LoadReport());
  set("kindred_router_worker_running", "Requests that a worker says it runs; NaN while it does not say.", load.running);
  set("kindred_router_worker_waiting", "Requests in a worker's own queue; NaN while it does not say.", load.waiting);
  set("kindred_router_worker_kv_usage", "KV cache in use at a worker, 0 to 1; NaN while it does not say.",
      load.kv_usage);
}

std::string RouterMetrics::render(const fleet::Fleet& fleet, bool engines) {
  // The removed too, or their last figures would stand for ever.
  for (const fleet::WorkerStatus& worker : fleet.status(/*all=*/true)) {
    const Labels labels = {{"role", std::string(to_string(worker.spec.role))}, {"worker", worker.spec.url}};
    registry_.gauge("kindred_router_in_flight", "Requests in flight at a worker; n choices count n.", labels)
        .set(static_cast<double>(worker.in_flight));
    registry_.gauge("kindred_router_tokens_in_flight", "Tokens to be read and made at a worker, as estimated.", labels)
        .set(static_cast<double>(worker.tokens_in_flight));
    render_load(worker, labels);
    registry_.gauge("kindred_router_worker_up", "1 if the worker is up.", labels)
        .set(worker.health == fleet::Health::kUp ? 1 : 0);
    registry_
        .gauge("kindred_router_breaker_open",
               "1 while the worker's requests failed in a row and none has succeeded since.", labels)
        .set(worker.breaker == fleet::BreakerState::kClosed ? 0 : 1);
    if (!engines) continue;
    for (const fleet::EngineStatus& engine : worker.engines) render_engine(worker, engine);
  }
  return registry_.render();
}

}  // namespace kindred::router
