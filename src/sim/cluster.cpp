#include "sim/cluster.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "sim/cluster_run.h"

namespace kindred::sim {
namespace {

constexpr size_t kMostWorkers = 4096;

int64_t to_ns(double seconds) { return std::llround(seconds * 1e9); }

bool reads_traces(const ClusterOptions& options) {
  return options.router.engine.has_value() || options.router.fleet.load == fleet::LoadSource::kPressure;
}

Status check_group(const WorkerGroup& group) {
  const auto wrong = [&](const std::string& what, const char* field) {
    return invalid(fmt::format("worker group '{}': {}", group.name, what), field);
  };
  if (group.count == 0) return wrong("no workers; accepted: 1 or more", "count");
  if (!group.cost) return wrong("no hardware profile", "profile");
  if (group.engines == 0 || group.ranks == 0) return wrong("engines and ranks: accepted: 1 or more", "engines");
  if (!group.lockstep && group.ranks > 1) {
    return wrong("engines whose experts are spread over ranks cannot step apart", "lockstep");
  }
  if (group.expert_parallel) {
    if (group.ranks < 2 || group.ranks % group.engines != 0) {
      return wrong("experts by rank need 2 ranks or more, as many for each engine", "ranks");
    }
    if (group.placement) return wrong("a placement of ExpertRanks beside expert_parallel's own", "placement");
    const auto& control = group.expert_parallel->control;
    if (control && !(control->window_s > 0)) return wrong("accepted: a window above 0 s", "window_s");
    if (control && control->rebalance.windows < 1) return wrong("accepted: 1 window or more", "windows");
  }
  const KvPoolOptions& kv = group.engine.kv;
  if (kv.block_tokens == 0 || kv.piece_tokens % kv.block_tokens != 0 || kv.piece_tokens == 0) {
    return wrong(
        fmt::format("pieces of {} tokens are no whole number of KV blocks of {}", kv.piece_tokens, kv.block_tokens),
        "block_tokens");
  }
  if (kv.blocks == 0) return wrong("no KV blocks", "kv_tokens");
  if (group.engine.max_running == 0) return wrong("max_running: accepted: 1 or more", "max_running");
  // Else some of those that decode would never get their turn.
  if (group.engine.token_budget < group.engine.max_running) {
    return wrong(fmt::format("a token budget of {} is less than its {} running requests need in a step",
                             group.engine.token_budget, group.engine.max_running),
                 "token_budget");
  }
  return {};
}

Status check_fleet(const ClusterOptions& options) {
  std::set<Role> roles;
  size_t workers = 0;
  for (const WorkerGroup& group : options.groups) {
    if (Status ok = check_group(group); !ok) return ok;
    if (reads_traces(options) && group.engines > fleet::kMostEngines) {
      return invalid(fmt::format("worker group '{}': {} engines to choose from; accepted: up to {}", group.name,
                                 group.engines, fleet::kMostEngines),
                     "engines");
    }
    if (group.engine.kv.piece_tokens != options.groups[0].engine.kv.piece_tokens) {
      return invalid("worker groups cut prompts into pieces of different sizes", "piece_tokens");
    }
    roles.insert(group.role);
    workers += group.count;
  }
  const bool pd = roles == std::set{Role::kPrefill, Role::kDecode};
  if (!pd && roles != std::set{Role::kBoth}) {
    return invalid("accepted: prefill and decode workers, or workers that do both, not a mixture", "workers");
  }
  if (workers > kMostWorkers) {
    return invalid(fmt::format("{} workers; accepted: up to {}", workers, kMostWorkers), "workers");
  }
  for (const TraceLoss& loss : options.trace_losses) {
    if (loss.worker >= workers || !(loss.from_s >= 0) || !(loss.until_s >= loss.from_s)) {
      return invalid(fmt::format("traces lost from {} to {} s of worker {}; accepted: an interval from 0 s, workers 0 "
                                 "to {}",
                                 loss.from_s, loss.until_s, loss.worker, workers - 1),
                     "trace_losses");
    }
  }
  for (const ScriptEvent& event : options.script) {
    if (event.worker >= workers || !(event.at_s >= 0)) {
      return invalid(fmt::format("event at {} s for worker {}; accepted: from 0 s, workers 0 to {}", event.at_s,
                                 event.worker, workers - 1),
                     "events");
    }
  }
  return {};
}

const WorkerGroup* group_of(const ClusterOptions& options, uint32_t worker) {
  for (const WorkerGroup& group : options.groups) {
    if (worker < group.count) return &group;
    worker -= group.count;
  }
  return nullptr;
}

Status check_request(const ClusterOptions& options, std::span<const SimRequest> requests, size_t i) {
  const SimRequest& request = requests[i];
  const auto wrong = [&](const std::string& what, const char* field) {
    return invalid(fmt::format("request {}: {}", i, what), field);
  };
  if (!(request.arrival_s >= 0) || request.arrival_s > 1e8) {
    return wrong(fmt::format("arrives at {} s; accepted: 0 to 1e8", request.arrival_s), "arrival_s");
  }
  if (i > 0 && request.arrival_s < requests[i - 1].arrival_s)
    return wrong("arrives before the one before", "arrival_s");
  if (request.prompt_tokens == 0 || request.output_tokens == 0) {
    return wrong("prompt and output: accepted: 1 token or more", "prompt_tokens");
  }
  if (request.direct) {
    const WorkerGroup* group = group_of(options, request.direct->worker);
    if (group == nullptr || group->role != Role::kBoth || request.direct->engine >= group->engines) {
      return wrong(fmt::format("goes to engine {} of worker {}; accepted: an engine of a worker that does both",
                               request.direct->engine, request.direct->worker),
                   "direct");
    }
  }
  const RequestExperts& experts = request.experts;
  if (!experts.prompt || !experts.decode || experts.decode->tokens() == 0) return wrong("no experts", "experts");
  const expert::ExpertShape& shape = requests[0].experts.prompt->shape;
  if (experts.prompt->shape != shape || experts.decode->layers() != shape.layers.size() ||
      experts.decode->words() != (shape.experts + 63) / 64) {
    return wrong("its experts are those of another model than request 0's", "experts");
  }
  for (const WorkerGroup& group : options.groups) {
    const uint64_t tokens =
        request.prompt_tokens + (group.role == Role::kPrefill ? uint64_t{0} : uint64_t{request.output_tokens});
    const uint64_t room = static_cast<uint64_t>(group.engine.kv.blocks) * group.engine.kv.block_tokens;
    if (tokens > room) {
      return wrong(fmt::format("{} tokens of KV do not fit into a worker of '{}', which holds {} tokens: it needs more "
                               "KV memory (--kv-tokens), or shorter requests",
                               tokens, group.name, room),
                   "kv_tokens");
    }
  }
  return {};
}

}  // namespace

std::string_view to_string(Ended ended) {
  switch (ended) {
    case Ended::kOk: return "ok";
    case Ended::kNoWorker: return "no_worker";
    case Ended::kRoomFull: return "room_full";
    case Ended::kWorkerLost: return "worker_lost";
  }
  return "?";
}

ClusterRun::ClusterRun(const ClusterOptions& options, std::span<const SimRequest> requests)
    : options_(options), given_(requests), requests_(requests.size()) {}

Status ClusterRun::start() {
  DispatchOptions router = options_.router;
  traces_ = reads_traces(options_);
  const expert::ExpertShape& shape = given_[0].experts.prompt->shape;
  const auto layers = static_cast<uint32_t>(shape.layers.size());
  for (const WorkerGroup& group : options_.groups) {
    disaggregated_ = disaggregated_ || group.role != Role::kBoth;
    std::shared_ptr<const ExpertRanks> ranks = group.placement;
    if (!ranks) ranks = std::make_shared<ExpertRanks>(ExpertRanks::linear(layers, shape.experts, group.ranks));
    if (ranks->layers() != layers || ranks->words() != (shape.experts + 63) / 64 || ranks->ranks() != group.ranks) {
      return invalid(
          fmt::format("worker group '{}': the placement is that of another model or number of ranks", group.name),
          "placement");
    }
    for (uint32_t i = 0; i < group.count; ++i) {
      workers_.push_back(make_worker(group, i, ranks));
      if (Status placed = place_experts(workers_.back(), shape); !placed) return placed;
    }
  }
  router.workers = static_cast<uint32_t>(std::min<size_t>(workers_.size() + options_.script.size(), 512));
  for (uint32_t i = 0; i < options_.routers; ++i) {
    auto made = Dispatcher::make(clock_, router);
    if (!made) return std::move(made).error();
    routers_.push_back(*std::move(made));
    ++router.decode.seed;  // or the dice of all would fall alike
    ++router.prefill.seed;
    ++router.fleet.dispatch_seed;
    if (router.engine) ++router.engine->seed;
  }
  std::vector<bool> joins(workers_.size(), false), seen(workers_.size(), false);
  for (const ScriptEvent& event : options_.script) {
    if (event.kind == ScriptKind::kJoin && !seen[event.worker]) joins[event.worker] = true;
    seen[event.worker] = true;
  }
  for (uint32_t w = 0; w < workers_.size(); ++w) {
    if (!joins[w]) join(w);
  }
  for (const auto& one : routers_) one->assign_cohorts();
  result_.requests.resize(given_.size());
  result_.fallbacks.assign(policy::kFallbackReasons, 0);
  return {};
}

Result<SimResult> ClusterRun::run() {
  push(to_ns(given_[0].arrival_s), {.kind = Kind::kArrival});
  for (uint32_t i = 0; i < options_.script.size(); ++i) {
    push(to_ns(options_.script[i].at_s), {.kind = Kind::kScript, .at = i});
  }
  if (options_.router.fleet.load == fleet::LoadSource::kPolled) push(0, {.kind = Kind::kPoll});
  if (!options_.script.empty()) push(0, {.kind = Kind::kProbe});
  while (!queue_.empty() && !all_ended() && !failed_) {
    const auto [at_ns, event] = queue_.pop();
    clock_.move_to(at_ns);
    handle(event);
    ++result_.events;
    // Once all that happens at this moment has happened, whoever has something to do begins it.
    if (!queue_.empty() && queue_.next_ns() == at_ns) continue;
    for (size_t i = 0; i < kicked_.size(); ++i) begin_steps(kicked_[i]);
    kicked_.clear();
    tell_changes();
  }
  if (failed_) return *failed_;
  KINDRED_CHECK(all_ended());
  finish_result();
  return std::move(result_);
}

void ClusterRun::finish_result() {
  result_.end_s = static_cast<double>(clock_.now_ns()) * 1e-9;
  for (Worker& worker : workers_) {
    measure_load(worker);
    if (worker.alive) worker.report.here_s += static_cast<double>(clock_.now_ns() - worker.alive_since_ns) * 1e-9;
    for (const Engine& engine : worker.engines) {
      worker.report.preemptions += engine.preemptions();
      worker.report.prompt_tokens += engine.prompt_tokens();
      worker.report.cached_tokens += engine.cached_tokens();
      worker.report.kv_left_blocks += engine.pool().used();
    }
    result_.workers.push_back(worker.report);
  }
  for (const auto& router : routers_) {
    for (const fleet::WorkerStatus& status : router->fleet().status(/*all=*/true)) {
      result_.ledger_left += status.in_flight;
      for (const fleet::EngineStatus& engine : status.engines) {
        const fleet::EngineLedger::Sums& left = engine.ledger;
        for (const int64_t count : {left.requests, left.unseen_requests, left.unseen_prefill_tokens,
                                    left.unseen_kv_tokens, left.unanswered_requests, left.unanswered_tokens}) {
          result_.engine_ledgers_left += std::abs(count);
        }
      }
    }
  }
}

void ClusterRun::handle(const Event& event) {
  switch (event.kind) {
    case Kind::kArrival:
      if (event.at + 1 < given_.size()) {
        push(to_ns(given_[event.at + 1].arrival_s), {.kind = Kind::kArrival, .at = event.at + 1});
      }
      arrive(event.at);
      break;
    case Kind::kStepEnd:
      if (workers_[event.at].epoch == event.epoch) end_step(event.at, event.part);
      break;
    case Kind::kFetched:
      if (requests_[event.at].phase == Phase::kHanded && requests_[event.at].attempt == event.epoch) fetched(event.at);
      break;
    case Kind::kPoll:
      poll();
      push(clock_.now_ns() + options_.poll_ms * 1'000'000, event);
      break;
    case Kind::kProbe:
      probe();
      push(clock_.now_ns() + options_.probe_ms * 1'000'000, event);
      break;
    case Kind::kScript: script(options_.script[event.at]); break;
    case Kind::kTrace:
      // Unless another one has been sent since it was planned, or its engine is gone.
      if (workers_[event.at].epoch == event.epoch && workers_[event.at].feeds[event.part].due_ns == clock_.now_ns()) {
        changed(event.at, event.part);
      }
      break;
    case Kind::kTraceArrives: trace_arrives(event.at); break;
  }
}

Result<SimResult> run_cluster(const ClusterOptions& options, std::span<const SimRequest> requests) {
  if (requests.empty()) return invalid("no request arrives", "trace");
  if (options.poll_ms < 1 || options.probe_ms < 1) return invalid("accepted: 1 ms or more", "poll_ms");
  if (options.trace_ms < 1 || options.trace_delay_ms < 0) {
    return invalid("accepted: a trace_ms of 1 or more, a trace_delay_ms of 0 or more", "trace_ms");
  }
  if (options.routers < 1 || options.routers > 64) return invalid("accepted: 1 to 64", "routers");
  if (Status ok = check_fleet(options); !ok) return std::move(ok).error();
  for (size_t i = 0; i < requests.size(); ++i) {
    if (Status ok = check_request(options, requests, i); !ok) return std::move(ok).error();
  }
  ClusterRun run(options, requests);
  if (Status started = run.start(); !started) return std::move(started).error();
  return run.run();
}

}  // namespace kindred::sim
