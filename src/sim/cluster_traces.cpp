// What engines say of themselves, on its way to the routers (fleet/engine_trace.h).

#include <algorithm>

#include "base/rng.h"
#include "sim/cluster_run.h"

namespace kindred::sim {
namespace {

constexpr int64_t kNsPerMs = 1'000'000;
constexpr int64_t kHeartbeat_ns = 1000 * kNsPerMs;

}  // namespace

void ClusterRun::tell_at(uint32_t worker, uint32_t engine, int64_t at_ns) {
  workers_[worker].feeds[engine].due_ns = at_ns;
  push(at_ns, {.kind = Kind::kTrace, .at = worker, .epoch = workers_[worker].epoch, .part = engine});
}

void ClusterRun::changed(uint32_t worker, uint32_t engine) {
  if (!traces_ || workers_[worker].feeds[engine].changed) return;
  workers_[worker].feeds[engine].changed = true;
  changed_.push_back({.worker = worker, .engine = engine});
}

// Once the next step has been planned, so that what it takes no longer counts as waiting.
void ClusterRun::tell_changes() {
  for (const auto& [worker, engine] : changed_) {
    Feed& feed = workers_[worker].feeds[engine];
    feed.changed = false;
    if (!workers_[worker].alive) continue;
    const int64_t allowed_ns = feed.sequence == 0 ? 0 : feed.pushed_ns + options_.trace_ms * kNsPerMs;
    if (allowed_ns <= clock_.now_ns()) send_trace(worker, engine);
    else if (feed.due_ns < 0 || allowed_ns < feed.due_ns) tell_at(worker, engine, allowed_ns);
  }
  changed_.clear();
}

fleet::EngineTrace ClusterRun::trace_of(Worker& worker, uint32_t at) {
  const Engine& engine = worker.engines[at];
  const Feed& feed = worker.feeds[at];
  const KvPool& pool = engine.pool();
  fleet::EngineTrace out;
  out.rank = at;
  // Another one after each restart, and never 0.
  out.epoch = mix64(mix64(worker.id) ^ worker.epoch) | 1;
  out.sequence = feed.sequence;
  out.time_s = static_cast<double>(clock_.now_ns()) * 1e-9;
  out.remaining_prefill_tokens = engine.remaining_prefill_tokens();
  out.waiting_prefill_tokens = engine.waiting_prefill_tokens();
  out.running = static_cast<uint32_t>(engine.running());
  out.waiting = static_cast<uint32_t>(engine.waiting());
  out.kv_usage = static_cast<double>(pool.used()) / pool.capacity();
  out.kv_tokens = uint64_t{pool.capacity()} * worker.group->engine.kv.block_tokens;
  const auto& exact = worker.group->expert_parallel;
  if (worker.expert_load && (!exact || exact->feedback)) {
    out.expert_pressure = worker.expert_load->recent_tokens(feed.first_rank, feed.last_rank, clock_.now_ns());
  }
  out.received.assign(feed.received.begin(), feed.received.end());
  return out;
}

void ClusterRun::send_trace(uint32_t at, uint32_t engine) {
  Worker& worker = workers_[at];
  Feed& feed = worker.feeds[engine];
  ++feed.sequence;
  feed.pushed_ns = clock_.now_ns();
  uint32_t way = 0;
  if (free_ways_.empty()) {
    way = static_cast<uint32_t>(on_their_way_.size());
    on_their_way_.emplace_back();
  } else {
    way = free_ways_.back();
    free_ways_.pop_back();
  }
  on_their_way_[way] = {.worker = at, .trace = trace_of(worker, engine)};
  push(clock_.now_ns() + options_.trace_delay_ms * kNsPerMs, {.kind = Kind::kTraceArrives, .at = way});
  tell_at(at, engine, clock_.now_ns() + kHeartbeat_ns);
}

void ClusterRun::trace_arrives(uint32_t at) {
  const TraceOnItsWay& way = on_their_way_[at];
  const double now_s = static_cast<double>(clock_.now_ns()) * 1e-9;
  const auto lost = [&](const TraceLoss& loss) {
    return loss.worker == way.worker && loss.engine == way.trace.rank && now_s >= loss.from_s && now_s < loss.until_s;
  };
  if (std::ranges::none_of(options_.trace_losses, lost)) {
    for (const auto& router : routers_) router->fleet().report_trace(workers_[way.worker].id, way.trace);
    ++result_.traces;
  }
  free_ways_.push_back(at);
}

}  // namespace kindred::sim
