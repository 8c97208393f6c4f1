// Engines of workers: their traces, and what policies read of them.

#include <algorithm>
#include <cmath>

#include "base/rng.h"
#include "fleet/fleet.h"

namespace kindred::fleet {

void Fleet::set_engines(Worker& worker, size_t engines) {
  // Ledgers have a seed each, so that an id of one engine means nothing at another.
  while (worker.engines.size() < std::min<size_t>(engines, kMostEngines)) {
    const uint64_t seed = mix64(options_.dispatch_seed ^ mix64(++engines_made_));
    worker.engines.push_back({.ledger = std::make_shared<EngineLedger>(clock_, seed)});
  }
}

void Fleet::resize_engines(Worker& worker, size_t engines) {
  set_engines(worker, engines);
  if (engines > 0 && worker.engines.size() > engines) worker.engines.resize(engines);
}

bool Fleet::report_trace(WorkerId id, const EngineTrace& trace) {
  const std::lock_guard lock(mutex_);
  Worker& worker = at(id);
  if (worker.removed || trace.rank >= kMostEngines) return false;
  // A kindred worker says how many there are; others show by their traces.
  if (worker.description.dialect != Dialect::kKindred) set_engines(worker, trace.rank + size_t{1});
  if (trace.rank >= worker.engines.size()) return false;
  EngineState& engine = worker.engines[trace.rank];
  const MonotonicTime now = clock_.now();
  // A number that goes back within an epoch is a message out of order, unless nothing newer has come for long: then
  // the sender was restarted and draws no epochs.
  const bool old = engine.pushed && trace.epoch == engine.epoch && trace.sequence <= engine.sequence;
  if (old && now - engine.load_at <= options_.trace_max_age_ms / 2) return false;
  engine.load = EngineLoad{.rank = trace.rank,
                           .running = static_cast<double>(trace.running),
                           .waiting = static_cast<double>(trace.waiting),
                           .kv_usage = std::min(trace.kv_usage, 1.0),
                           .kv_used_tokens = trace.kv_usage * static_cast<double>(trace.kv_tokens),
                           .kv_tokens = static_cast<double>(trace.kv_tokens),
                           .remaining_prefill_tokens = static_cast<double>(trace.remaining_prefill_tokens),
                           .waiting_prefill_tokens = static_cast<double>(trace.waiting_prefill_tokens)};
  engine.expert_pressure = trace.expert_pressure;
  engine.load_at = now;
  engine.pushed = true;
  engine.epoch = trace.epoch;
  engine.sequence = trace.sequence;
  engine.skew_s = trace.time_s - clock_.unix_time_s();
  engine.ledger->seen(trace.received);
  // Other servers may not have been told the name (a client's own vllm_xargs that cannot be added to, other versions).
  if (worker.description.dialect != Dialect::kKindred) engine.ledger->seen_answered();
  return true;
}

bool Fleet::pushes_traces(EngineRef engine) const {
  const std::lock_guard lock(mutex_);
  const Worker& worker = at(engine.worker);
  return engine.rank < worker.engines.size() && worker.engines[engine.rank].pushed;
}

void Fleet::report_engines(WorkerId id, std::span<const EngineLoad> engines, MonotonicTime asked) {
  const std::lock_guard lock(mutex_);
  Worker& worker = at(id);
  if (worker.removed) return;
  size_t named = 0;
  for (const EngineLoad& load : engines) {
    if (load.rank < kMostEngines) named = std::max(named, load.rank + size_t{1});
  }
  // It names all its engines: after a restart there may be fewer. A kindred worker says how many there are.
  if (named > 0 && worker.description.dialect != Dialect::kKindred) resize_engines(worker, named);
  for (const EngineLoad& load : engines) {
    if (load.rank >= worker.engines.size()) continue;
    EngineState& engine = worker.engines[load.rank];
    // Pushes are newer and say more, as long as they come.
    if (engine.pushed && clock_.now() - engine.load_at <= options_.trace_max_age_ms) continue;
    engine.load = load;
    engine.expert_pressure = 0;
    engine.load_at = clock_.now();
    engine.pushed = false;
    engine.ledger->seen_before(asked);
  }
}

policy::TraceState Fleet::trace_state(const Worker& worker, const EngineState& engine, MonotonicTime now) const {
  const auto max_age_ms = engine.pushed ? options_.trace_max_age_ms : options_.load_max_age_ms;
  const MonotonicTime fresh_until = engine.load ? engine.load_at + max_age_ms : worker.since;
  if (engine.load && now <= fresh_until) return policy::TraceState::kFresh;
  return now <= fresh_until + options_.trace_grace_ms ? policy::TraceState::kLate : policy::TraceState::kUnknown;
}

policy::EngineView Fleet::view_of(const Worker& worker, const EngineState& engine, MonotonicTime now) const {
  const EngineLedger::Sums sums = engine.ledger->sums();
  policy::EngineView out;
  out.trace = trace_state(worker, engine, now);
  out.in_flight = static_cast<double>(sums.requests);
  out.throughput = sums.ended_per_s;
  if (out.trace != policy::TraceState::kFresh) {
    out.unseen = out.in_flight;
    out.compensation_tokens = static_cast<double>(sums.unanswered_tokens);
    return out;
  }
  const EngineLoad& load = *engine.load;
  out.running = load.running;
  out.waiting = load.waiting;
  out.kv_usage = load.kv_usage;
  out.kv_used_tokens = load.kv_used_tokens;
  out.expert_pressure = engine.expert_pressure;
  out.unseen = static_cast<double>(sums.unseen_requests);
  if (load.remaining_prefill_tokens && load.waiting_prefill_tokens) {
    out.remaining_prefill_tokens = *load.remaining_prefill_tokens;
    out.waiting_prefill_tokens = *load.waiting_prefill_tokens;
    out.compensation_tokens = static_cast<double>(sums.unseen_prefill_tokens);
  } else {
    // It counts requests only. Of ours we know the prompts; of others' who wait, the mean of ours stands in.
    const double others = load.waiting - static_cast<double>(sums.unanswered_requests);
    out.waiting_prefill_tokens = std::max(0.0, others) * sums.mean_prompt_tokens;
    out.compensation_tokens = static_cast<double>(sums.unanswered_tokens);
  }
  // An engine that says it has nothing to do while prompts of ours are there without an answer is not believed.
  const bool idle = load.running + load.waiting + out.remaining_prefill_tokens + out.waiting_prefill_tokens <= 0;
  if (idle) out.compensation_tokens = static_cast<double>(sums.unanswered_tokens);
  return out;
}

EngineSnapshot Fleet::engine_snapshot(const Query& query) const {
  const std::lock_guard lock(mutex_);
  EngineSnapshot out;
  const MonotonicTime now = clock_.now();
  for (const WorkerId id : members_) {
    const Worker& worker = *workers_[id];
    if (worker.spec.role != query.role) continue;
    const bool available = suits(worker, id, query, now);
    const double share = worker.breaker.share(options_.breaker, now);
    for (uint32_t rank = 0; rank < worker.engines.size(); ++rank) {
      policy::EngineView view = view_of(worker, worker.engines[rank], now);
      view.available = available;
      view.share = share;
      out.available += available ? 1 : 0;
      out.views.push_back(view);
      out.engines.push_back({.worker = id, .rank = rank});
    }
  }
  return out;
}

LoadGuard Fleet::take(EngineRef engine, LegLoad load, int64_t prefill_tokens) {
  LoadGuard guard = take(engine.worker, load);
  const std::lock_guard lock(mutex_);
  const Worker& worker = at(engine.worker);
  if (engine.rank >= worker.engines.size()) return guard;
  guard.engine_ = worker.engines[engine.rank].ledger;
  guard.dispatch_ = guard.engine_->begin({.requests = load.requests,
                                          .prefill_tokens = std::max<int64_t>(prefill_tokens, 0),
                                          .kv_tokens = std::max<int64_t>(load.tokens, 0)});
  return guard;
}

std::optional<double> Fleet::pressure_load(const Worker& worker, MonotonicTime now) const {
  std::vector<policy::EngineView> views;
  double unseen_kv = 0;  // as shares of an engine's KV
  for (const EngineState& engine : worker.engines) {
    policy::EngineView view = view_of(worker, engine, now);
    if (view.trace != policy::TraceState::kFresh) continue;
    views.push_back(view);
    if (engine.load->kv_tokens > 0) {
      unseen_kv += static_cast<double>(engine.ledger->sums().unseen_kv_tokens) / engine.load->kv_tokens;
    }
  }
  if (views.empty()) return std::nullopt;
  const double expert_mean = policy::mean_expert_pressure(views);
  double sum = options_.pressure.kv ? options_.pressure.kv_weight * unseen_kv : 0;
  for (const policy::EngineView& view : views) {
    sum += policy::pressure_of(view, expert_mean, options_.pressure).score();
  }
  return sum / static_cast<double>(views.size());
}

std::vector<EngineStatus> Fleet::engine_status(const Worker& worker) const {
  const MonotonicTime now = clock_.now();
  std::vector<policy::EngineView> views;
  for (const EngineState& engine : worker.engines) views.push_back(view_of(worker, engine, now));
  const double expert_mean = policy::mean_expert_pressure(views);
  std::vector<EngineStatus> out;
  for (uint32_t rank = 0; rank < views.size(); ++rank) {
    const EngineState& engine = worker.engines[rank];
    out.push_back({.rank = rank,
                   .trace = views[rank].trace,
                   .trace_age_s = engine.load ? seconds_between(engine.load_at, now) : -1,
                   .pushed = engine.pushed,
                   .sequence = engine.sequence,
                   .skew_s = engine.skew_s,
                   .view = views[rank],
                   .pressure = policy::pressure_of(views[rank], expert_mean, options_.pressure),
                   .ledger = engine.ledger->sums()});
  }
  return out;
}

}  // namespace kindred::fleet
