// Workers: their steps, the network between them, and what befalls them.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "sim/cluster_run.h"

namespace kindred::sim {
namespace {

// A step takes time, or simulated time would stand still.
int64_t duration_ns(double seconds) { return std::max<int64_t>(1, std::llround(seconds * 1e9)); }

}  // namespace

// At the engine with the fewest requests, as data-parallel engines share out what their worker gets.
ClusterRun::Place ClusterRun::put(uint32_t worker, const Sequence& sequence) {
  std::vector<Engine>& engines = workers_[worker].engines;
  const auto requests = [](const Engine& engine) { return engine.running() + engine.waiting(); };
  const auto at = static_cast<uint32_t>(std::ranges::min_element(engines, {}, requests) - engines.begin());
  kick(worker);
  return {.worker = worker, .engine = at, .slot = engines[at].add(sequence)};
}

void ClusterRun::begin_step(uint32_t at) {
  Worker& worker = workers_[at];
  if (!worker.alive || worker.busy) return;
  measure_kv(worker);
  worker.experts.clear();
  shapes_.assign(worker.engines.size(), {});
  bool any = false;
  for (size_t e = 0; e < worker.engines.size(); ++e) {
    fetches_.clear();
    any = worker.engines[e].plan(shapes_[e], worker.experts, fetches_) || any;
    for (const uint32_t slot : fetches_) begin_transfer(worker.engines[e].request(slot), at);
    const std::vector<uint64_t> evicted = worker.engines[e].pool().take_evicted();
    if (evicted.empty()) continue;
    for (const auto& router : routers_) router->evicted(worker.id, evicted);
  }
  if (!any) return;
  const std::span<const uint32_t> experts = worker.experts.count();
  worker.step_prefill = worker.step_decode = 0;
  double longest_s = 0;
  for (StepShape& shape : shapes_) {
    worker.step_prefill += shape.prefill_tokens;
    worker.step_decode += shape.decode_requests;
  }
  for (StepShape& shape : shapes_) {
    shape.experts = experts;
    shape.ranks = worker.group->ranks;
    shape.group_tokens = worker.step_prefill + worker.step_decode;
    longest_s = std::max(longest_s, worker.group->cost->step_s(shape));
  }
  const auto layers = static_cast<double>(experts.size());
  worker.step_experts = static_cast<double>(worker.experts.distinct()) / layers;
  worker.step_worst = 0;
  for (const uint32_t count : experts) worker.step_worst += count / layers;
  worker.busy = true;
  worker.step_begin_ns = clock_.now_ns();
  push(clock_.now_ns() + duration_ns(longest_s), {.kind = Kind::kStepEnd, .at = at, .epoch = worker.epoch});
}

void ClusterRun::end_step(uint32_t at) {
  Worker& worker = workers_[at];
  WorkerReport& report = worker.report;
  measure_kv(worker);
  const double took_s = static_cast<double>(clock_.now_ns() - worker.step_begin_ns) * 1e-9;
  ++report.steps;
  ++result_.steps_run;
  report.busy_s += took_s;
  report.prefill_tokens += worker.step_prefill;
  report.all_decode_tokens += worker.step_decode;
  if (worker.step_prefill == 0) {
    ++report.decode_steps;
    report.decode_s += took_s;
    report.decode_tokens += worker.step_decode;
    report.expert_reads += worker.step_experts;
    report.worst_rank_reads += worker.step_worst;
  }
  if (result_.steps.size() < options_.step_records) {
    result_.steps.push_back({.worker = at,
                             .begin_ns = worker.step_begin_ns,
                             .end_ns = clock_.now_ns(),
                             .prefill_tokens = worker.step_prefill,
                             .decode_requests = worker.step_decode,
                             .experts = static_cast<float>(worker.step_experts)});
  }
  worker.busy = false;
  emitted_.clear();
  for (Engine& engine : worker.engines) engine.finish(emitted_);
  for (const Emitted& emitted : emitted_) token(at, emitted);
  kick(at);
}

void ClusterRun::begin_transfer(uint32_t at, uint32_t to) {
  Request& request = requests_[at];
  Worker& source = workers_[request.prefill.worker];
  Worker& target = workers_[to];
  const double tokens = given_[at].prompt_tokens;
  const double takes_s = std::max(source.group->cost->kv_transfer_s(tokens), target.group->cost->kv_transfer_s(tokens));
  const int64_t begin_ns = std::max({clock_.now_ns(), source.out_free_ns, target.in_free_ns});
  const int64_t end_ns = begin_ns + std::max<int64_t>(0, std::llround(takes_s * 1e9));
  source.out_free_ns = target.in_free_ns = end_ns;
  push(end_ns, {.kind = Kind::kFetched, .at = at, .epoch = request.attempt});
}

void ClusterRun::fetched(uint32_t at) {
  Request& request = requests_[at];
  request.fetched = true;
  result_.requests[at].fetched_ns = clock_.now_ns();
  workers_[request.decode.worker].engines[request.decode.engine].fetched(request.decode.slot);
  kick(request.decode.worker);
}

void ClusterRun::measure_kv(Worker& worker) {
  double share = 0;
  for (const Engine& engine : worker.engines) {
    share += static_cast<double>(engine.pool().used()) / engine.pool().capacity();
  }
  share /= static_cast<double>(worker.engines.size());
  worker.report.kv_share_s += share * static_cast<double>(clock_.now_ns() - worker.kv_seen_ns) * 1e-9;
  worker.report.kv_peak = std::max(worker.report.kv_peak, share);
  worker.kv_seen_ns = clock_.now_ns();
}

void ClusterRun::join(uint32_t at) {
  Worker& worker = workers_[at];
  if (worker.alive) return;
  worker.alive = true;
  worker.alive_since_ns = worker.kv_seen_ns = clock_.now_ns();
  const bool known = worker.id != kNobody;
  for (const auto& router : routers_) {
    if (known) {  // a health check will find it
      router->fleet().restore(worker.id);
      continue;
    }
    const fleet::WorkerId id = router->add(worker.group->role, fmt::format("http://{}", worker.report.name));
    worker_of_.resize(id + 1, kNobody);
    worker_of_[id] = at;
    router->up(id);
  }
  if (!known) worker.id = static_cast<fleet::WorkerId>(worker_of_.size() - 1);  // the same in all
}

void ClusterRun::fail(uint32_t at) {
  Worker& worker = workers_[at];
  if (!worker.alive) return;
  measure_kv(worker);
  worker.alive = worker.busy = false;
  ++worker.epoch;
  worker.report.here_s += static_cast<double>(clock_.now_ns() - worker.alive_since_ns) * 1e-9;
  for (Engine& engine : worker.engines) engine.clear();
  for (const auto& router : routers_) router->cleared(worker.id);
  for (uint32_t i = 0; i < requests_.size(); ++i) {
    if (requests_[i].phase == Phase::kNotYet) break;  // nor has any later one come
    lost_with(i, at);
  }
}

void ClusterRun::script(const ScriptEvent& event) {
  switch (event.kind) {
    case ScriptKind::kJoin: return join(event.worker);
    case ScriptKind::kFail: return fail(event.worker);
    case ScriptKind::kLeave:
      if (workers_[event.worker].id == kNobody) return;
      for (const auto& router : routers_) router->fleet().remove(workers_[event.worker].id);
      return;
  }
}

void ClusterRun::poll() {
  for (const Worker& worker : workers_) {
    if (!worker.alive) continue;
    double running = 0, waiting = 0, usage = 0;
    for (const Engine& engine : worker.engines) {
      running += static_cast<double>(engine.running());
      waiting += static_cast<double>(engine.waiting());
      usage = std::max(usage, static_cast<double>(engine.pool().used()) / engine.pool().capacity());
    }
    for (const auto& router : routers_) {
      router->fleet().report_load(worker.id, {.running = running, .waiting = waiting, .kv_usage = usage});
    }
  }
}

void ClusterRun::probe() {
  for (const auto& router : routers_) {
    fleet::Fleet& fleet = router->fleet();
    for (const Worker& worker : workers_) {
      if (worker.id == kNobody || fleet.removed(worker.id)) continue;
      if (!worker.alive) fleet.report_failure(worker.id, "health check failed");
      else if (fleet.health(worker.id) != fleet::Health::kUp) router->up(worker.id);
    }
  }
}

}  // namespace kindred::sim
