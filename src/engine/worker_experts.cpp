// The worker's endpoints for expert ranks: what the traffic is, where experts are, and moving them.

#include <fmt/format.h>

#include <algorithm>

#include "base/json.h"
#include "engine/expert_controller.h"
#include "engine/expert_ranks.h"
#include "engine/worker_impl.h"

namespace kindred::engine {

using net::Task;

namespace {

constexpr std::string_view kExpertsJson = "application/json";

// Rows of `width` numbers.
template <class T>
Json rows_of(const std::vector<T>& numbers, size_t width) {
  Json rows = Json::array();
  for (size_t begin = 0; begin < numbers.size(); begin += width) {
    rows.push_back(
        std::vector<T>(numbers.begin() + static_cast<std::ptrdiff_t>(begin),
                       numbers.begin() + static_cast<std::ptrdiff_t>(std::min(begin + width, numbers.size()))));
  }
  return rows;
}

// A: [layers][sources][experts].
Json traffic_of(const RankTraffic& traffic, const RankShape& shape) {
  Json layers = Json::array();
  const size_t layer_cells = size_t{traffic.sources} * shape.experts;
  for (uint32_t l = 0; l < shape.layers; ++l) {
    const auto begin = traffic.tokens.begin() + static_cast<std::ptrdiff_t>(l * layer_cells);
    layers.push_back(
        rows_of(std::vector<uint64_t>(begin, begin + static_cast<std::ptrdiff_t>(layer_cells)), shape.experts));
  }
  return layers;
}

Json latency_of(const StepLatency& latency) {
  return {{"steps", latency.steps}, {"p50_ms", latency.p50_ms}, {"p99_ms", latency.p99_ms}};
}

Json migration_of(const ExpertRanks& ranks) {
  const MigrationProgress progress = ranks.progress();
  return {{"active", progress.active},
          {"cancelled", progress.cancelled},
          {"moved", progress.moved},
          {"remaining", progress.remaining},
          {"bytes", progress.bytes},
          {"seconds", progress.seconds},
          {"total_moves", progress.total_moves},
          {"total_bytes", progress.total_bytes},
          {"step_before", latency_of(ranks.step_latency(false))},
          {"step_during", latency_of(ranks.step_latency(true))}};
}

Json placement_of(const ExpertPlacement& placement) {
  return {{"layers", placement.layers},
          {"experts", placement.experts},
          {"ranks", placement.ranks},
          {"placement", rows_of(placement.rank_of, placement.experts)}};
}

Json experts_of(const ExpertRanks& ranks) {
  const RankShape& shape = ranks.shape();
  const RankTraffic window = ranks.window();
  const std::vector<uint64_t> loads = rank_loads(window, shape);
  std::vector<double> active;
  for (uint32_t l = 0; l < shape.layers; ++l) {
    active.push_back(window.dispatches[l] == 0
                         ? 0.0
                         : static_cast<double>(window.active[l]) / static_cast<double>(window.dispatches[l]));
  }
  Json out = placement_of(ranks.placement());
  out["v"] = 1;
  out["model_layers"] = ranks.layers();
  out["top_k"] = ranks.top_k();
  out["sources"] = window.sources;
  out["window_s"] = window.seconds;
  out["A"] = traffic_of(window, shape);
  out["B"] = rows_of(expert_tokens(window, shape), shape.experts);
  out["rank_tokens"] = loads;
  out["imbalance"] = rank_imbalance(window, shape);
  out["dispatch_imbalance"] = dispatch_imbalance(window, shape);
  out["remote_share"] = remote_share(window, shape);
  out["active_experts"] = active;
  out["rank_active_experts"] = rank_active_experts(window);
  out["expert_pressure"] = ranks.expert_pressure();
  out["stalled_ranks"] = ranks.stalled_ranks();
  out["migration"] = migration_of(ranks);
  if (const ExpertController* controller = ranks.controller(); controller != nullptr) {
    const ExpertControllerReport report = controller->report();
    out["controller"] = {{"solver", place::to_string(controller->options().rebalance.solver)},
                         {"windows", report.windows},
                         {"applied", report.applied},
                         {"failed", report.failed},
                         {"reason", report.reason}};
  }
  return out;
}

ApiError no_ranks() {
  return {404, "invalid_request_error", "no_expert_ranks", {}, "this worker runs without --expert-ranks"};
}

}  // namespace

Task<void> Worker::Impl::experts_get(Exchange& x) {
  const ExpertRanks* ranks = backend->model.ranks();
  if (ranks == nullptr) {
    const ApiError error = no_ranks();
    co_return co_await send_error(x, error);
  }
  const std::string body = dump_json(experts_of(*ranks));
  co_await send(x, 200, kExpertsJson, body);
}

Task<void> Worker::Impl::placement_post(Exchange& x) {
  ExpertRanks* ranks = backend->model.ranks();
  if (ranks == nullptr) {
    const ApiError error = no_ranks();
    co_return co_await send_error(x, error);
  }
  const RankShape& shape = ranks->shape();
  const auto target = parse_expert_placement(x.request.body, shape.layers, shape.experts, shape.ranks);
  if (!target) co_return co_await send_error(x, api_error(target.error()));
  if (const Status applied = ranks->apply(*target); !applied) {
    co_return co_await send_error(x, api_error(applied.error()));
  }
  log.info("a placement is applied: {} experts to move", ranks->progress().remaining);
  const std::string body = dump_json(migration_of(*ranks));
  co_await send(x, 202, kExpertsJson, body);
}

Task<void> Worker::Impl::placement_delete(Exchange& x) {
  ExpertRanks* ranks = backend->model.ranks();
  if (ranks == nullptr) {
    const ApiError error = no_ranks();
    co_return co_await send_error(x, error);
  }
  ranks->cancel();
  const std::string body = dump_json(migration_of(*ranks));
  co_await send(x, 200, kExpertsJson, body);
}

void Worker::Impl::show_experts() {
  const ExpertRanks* ranks = backend ? backend->model.ranks() : nullptr;
  if (ranks == nullptr) return;
  const RankTraffic window = ranks->window();
  registry
      .gauge("kindred_expert_rank_imbalance",
             "Largest over mean load of the expert ranks, layer by layer, in the window.")
      .set(rank_imbalance(window, ranks->shape()));
  registry
      .gauge("kindred_expert_remote_share",
             "Share of expert tokens, in the window, that went to a rank which is not their engine's own.")
      .set(remote_share(window, ranks->shape()));
  registry.gauge("kindred_expert_stalled_ranks", "Expert ranks that do not answer.").set(ranks->stalled_ranks());
  const MigrationProgress progress = ranks->progress();
  const auto raise = [](Counter& counter, uint64_t to) { counter.add(static_cast<double>(to) - counter.value()); };
  raise(registry.counter("kindred_expert_moves_total", "Experts that changed their rank."), progress.total_moves);
  raise(registry.counter("kindred_expert_moved_bytes_total", "Bytes of weights copied for it."), progress.total_bytes);
}

}  // namespace kindred::engine
