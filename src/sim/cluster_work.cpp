// Workers: their steps, the network between them, and what befalls them.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "sim/cluster_run.h"

namespace kindred::sim {
namespace {

// A step takes time, or simulated time would stand still.
int64_t duration_ns(double seconds) { return std::max<int64_t>(1, std::llround(seconds * 1e9)); }

// Null: more ranks than a router keeps apart.
std::shared_ptr<const expert::RankMap> rank_map_of(const ExpertRanks& ranks, uint32_t experts) {
  std::vector<uint32_t> of;
  for (uint32_t l = 0; l < ranks.layers(); ++l) {
    for (uint32_t e = 0; e < experts; ++e) of.push_back(ranks.rank_of(l, e));
  }
  auto map = expert::RankMap::make(ranks.layers(), experts, ranks.ranks(), of);
  return map ? std::make_shared<const expert::RankMap>(*std::move(map)) : nullptr;
}

}  // namespace

ClusterRun::Worker ClusterRun::make_worker(const WorkerGroup& group, uint32_t number,
                                           std::shared_ptr<const ExpertRanks> ranks) const {
  Worker worker;
  worker.group = &group;
  worker.engines.assign(group.engines, Engine(group.engine));
  worker.report.name = fmt::format("{}-{}", group.name, number);
  worker.report.role = group.role;
  worker.report.engines.resize(group.engines);
  const uint32_t together = group.lockstep ? group.engines : 1;
  for (uint32_t e = 0; e < group.engines; e += together) {
    worker.units.push_back({.first = e, .last = e + together, .experts = ExpertUnion(ranks)});
  }
  worker.feeds.resize(group.engines);
  for (uint32_t e = 0; e < group.engines; ++e) {
    worker.feeds[e].first_rank = e * group.ranks / group.engines;
    worker.feeds[e].last_rank = std::max(worker.feeds[e].first_rank + 1, (e + 1) * group.ranks / group.engines);
  }
  if (group.ranks > 1) {
    worker.rank_map = rank_map_of(*ranks, given_[0].experts.prompt->shape.experts);
    worker.expert_load = std::make_unique<ExpertLoad>(std::move(ranks));
  }
  return worker;
}

// Without a say, at the engine with the fewest requests, as data-parallel engines share out what their worker gets.
ClusterRun::Place ClusterRun::put(uint32_t worker, std::optional<uint32_t> engine, Sequence sequence,
                                  uint64_t dispatch) {
  std::vector<Engine>& engines = workers_[worker].engines;
  const auto requests = [](const Engine& of) { return of.running() + of.waiting(); };
  const auto fewest = static_cast<uint32_t>(std::ranges::min_element(engines, {}, requests) - engines.begin());
  const uint32_t at = engine.value_or(fewest);
  sequence.arrival_ns = clock_.now_ns();
  measure_load(workers_[worker]);
  const uint32_t slot = engines.at(at).add(sequence);
  if (dispatch != 0) {
    std::deque<uint64_t>& received = workers_[worker].feeds[at].received;
    received.push_back(dispatch);
    if (received.size() > fleet::kReceived) received.pop_front();
  }
  changed(worker, at);
  kick(worker);
  return {.worker = worker, .engine = at, .slot = slot};
}

void ClusterRun::begin_steps(uint32_t at) {
  for (uint32_t u = 0; u < workers_[at].units.size(); ++u) begin_step(at, u);
}

// False: there is nothing to run.
bool ClusterRun::plan_unit(uint32_t at, Unit& unit) {
  Worker& worker = workers_[at];
  unit.experts.clear();
  shapes_.assign(unit.last - unit.first, {});
  bool any = false;
  for (uint32_t e = unit.first; e < unit.last; ++e) {
    Engine& engine = worker.engines[e];
    fetches_.clear();
    any = engine.plan(shapes_[e - unit.first], unit.experts, fetches_, clock_.now_ns()) || any;
    for (const uint32_t slot : fetches_) begin_transfer(engine.request(slot), at);
    const std::vector<uint64_t> evicted = engine.pool().take_evicted();
    if (evicted.empty()) continue;
    for (const auto& router : routers_) router->evicted(worker.id, evicted);
  }
  return any;
}

// What of an engine's tokens goes where.
void ClusterRun::note_experts(Worker& worker, uint32_t engine, StepShape& shape) {
  const Feed& feed = worker.feeds[engine];
  double tokens = 0, stays = 0;
  worker.engines[engine].for_each_planned([&](const RequestExperts& experts, uint32_t prompt, uint32_t generated) {
    ExpertLoad& load = *worker.expert_load;
    load.add(experts, prompt, generated, clock_.now_ns());
    tokens += prompt + generated;
    if (prompt > 0) stays += prompt * load.prompt_share(experts, feed.first_rank, feed.last_rank);
    if (generated > 0) stays += generated * load.generated_share(experts, feed.first_rank, feed.last_rank);
  });
  if (tokens > 0) shape.remote_share = std::clamp(1 - stays / tokens, 0.0, 1.0);
}

double ClusterRun::step_s(Worker& worker, Unit& unit) {
  unit.prefill = unit.decode = 0;
  unit.engine_prefill.clear();
  for (const StepShape& shape : shapes_) {
    unit.prefill += shape.prefill_tokens;
    unit.decode += shape.decode_requests;
    unit.engine_prefill.push_back(shape.prefill_tokens);
  }
  if (worker.flow) return step_on_ranks_s(worker, unit);
  const std::span<const uint32_t> experts = unit.experts.count();
  double longest_s = 0;
  for (uint32_t e = unit.first; e < unit.last; ++e) {
    StepShape& shape = shapes_[e - unit.first];
    shape.experts = experts;
    shape.ranks = worker.group->ranks;
    shape.group_tokens = unit.prefill + unit.decode;
    if (worker.expert_load) note_experts(worker, e, shape);
    longest_s = std::max(longest_s, worker.group->cost->step_s(shape));
  }
  const auto layers = static_cast<double>(experts.size());
  unit.distinct = static_cast<double>(unit.experts.distinct()) / layers;
  unit.worst = 0;
  for (const uint32_t count : experts) unit.worst += count / layers;
  return longest_s;
}

void ClusterRun::begin_step(uint32_t at, uint32_t part) {
  Worker& worker = workers_[at];
  Unit& unit = worker.units[part];
  if (!worker.alive || unit.busy) return;
  measure_load(worker);
  if (worker.control && begin_move(at, part)) return;
  if (!plan_unit(at, unit)) return;
  unit.busy = true;
  unit.begin_ns = clock_.now_ns();
  push(clock_.now_ns() + duration_ns(step_s(worker, unit)),
       {.kind = Kind::kStepEnd, .at = at, .epoch = worker.epoch, .part = part});
  for (uint32_t e = unit.first; e < unit.last; ++e) {
    if (shapes_[e - unit.first].prefill_tokens > 0) changed(at, e);
  }
}

void ClusterRun::report_step(uint32_t at, const Unit& unit) {
  WorkerReport& report = workers_[at].report;
  const auto units = static_cast<double>(workers_[at].units.size());
  const double took_s = static_cast<double>(clock_.now_ns() - unit.begin_ns) * 1e-9 / units;
  ++report.steps;
  ++result_.steps_run;
  report.busy_s += took_s;
  report.prefill_tokens += unit.prefill;
  report.all_decode_tokens += unit.decode;
  if (unit.prefill == 0) {
    ++report.decode_steps;
    report.decode_s += took_s;
    report.decode_tokens += unit.decode;
    report.expert_reads += unit.distinct;
    report.worst_rank_reads += unit.worst;
  }
  for (uint32_t e = unit.first; e < unit.last; ++e) {
    EngineReport& engine = report.engines[e];
    const uint32_t tokens = unit.engine_prefill[e - unit.first];
    engine.prefill_tokens += tokens;
    if (!options_.engine_series || tokens == 0) continue;
    const auto second = static_cast<size_t>(clock_.now_ns() / 1'000'000'000);
    if (engine.prompt_tokens_by_s.size() <= second) engine.prompt_tokens_by_s.resize(second + 1, 0);
    engine.prompt_tokens_by_s[second] += tokens;
  }
  if (result_.steps.size() < options_.step_records) {
    result_.steps.push_back({.worker = at,
                             .begin_ns = unit.begin_ns,
                             .end_ns = clock_.now_ns(),
                             .prefill_tokens = unit.prefill,
                             .decode_requests = unit.decode,
                             .experts = static_cast<float>(unit.distinct)});
  }
}

void ClusterRun::end_step(uint32_t at, uint32_t part) {
  Worker& worker = workers_[at];
  Unit& unit = worker.units[part];
  measure_load(worker);
  unit.busy = false;
  if (unit.moving) {
    end_move(worker, unit);
    return kick(at);
  }
  report_step(at, unit);
  emitted_.clear();
  for (uint32_t e = unit.first; e < unit.last; ++e) {
    worker.engines[e].finish(emitted_);
    changed(at, e);
  }
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
  changed(request.decode.worker, request.decode.engine);
  kick(request.decode.worker);
}

void ClusterRun::measure_load(Worker& worker) {
  const double passed_s = static_cast<double>(clock_.now_ns() - worker.kv_seen_ns) * 1e-9;
  double share = 0;
  for (size_t e = 0; e < worker.engines.size(); ++e) {
    const Engine& engine = worker.engines[e];
    const double used = static_cast<double>(engine.pool().used()) / engine.pool().capacity();
    share += used;
    worker.report.engines[e].kv_share_s += used * passed_s;
    worker.report.engines[e].running_s += static_cast<double>(engine.running()) * passed_s;
  }
  share /= static_cast<double>(worker.engines.size());
  worker.report.kv_share_s += share * passed_s;
  worker.report.kv_peak = std::max(worker.report.kv_peak, share);
  worker.kv_seen_ns = clock_.now_ns();
}

void ClusterRun::join(uint32_t at) {
  Worker& worker = workers_[at];
  if (worker.alive) return;
  worker.alive = true;
  worker.alive_since_ns = worker.kv_seen_ns = clock_.now_ns();
  const uint32_t engines = worker.group->engines;
  for (uint32_t e = 0; e < engines; ++e) changed(at, e);
  const bool known = worker.id != kNobody;
  for (const auto& router : routers_) {
    if (known) {  // a health check will find it
      router->fleet().restore(worker.id);
      continue;
    }
    const fleet::WorkerId id = router->add(worker.group->role, fmt::format("http://{}", worker.report.name));
    worker_of_.resize(id + 1, kNobody);
    worker_of_[id] = at;
    router->up(id, engines);
    if (worker.rank_map) router->fleet().report_ranks(id, worker.rank_map);
  }
  if (!known) worker.id = static_cast<fleet::WorkerId>(worker_of_.size() - 1);  // the same in all
}

void ClusterRun::fail(uint32_t at) {
  Worker& worker = workers_[at];
  if (!worker.alive) return;
  measure_load(worker);
  worker.alive = false;
  ++worker.epoch;
  for (Unit& unit : worker.units) unit.busy = unit.moving = false;
  for (Feed& feed : worker.feeds) {
    feed.sequence = 0;
    feed.due_ns = -1;
    feed.received.clear();
  }
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
      else if (fleet.health(worker.id) != fleet::Health::kUp) router->up(worker.id, worker.group->engines);
    }
  }
}

}  // namespace kindred::sim
