// Workers whose copies of tokens are counted rank by rank, and whose experts may move.

#include <algorithm>
#include <cmath>

#include "sim/cluster_run.h"

namespace kindred::sim {

Status ClusterRun::place_experts(Worker& worker, const expert::ExpertShape& shape) const {
  const WorkerGroup& group = *worker.group;
  if (!group.expert_parallel) return {};
  const auto layers = static_cast<uint32_t>(shape.layers.size());
  worker.flow = std::make_unique<RankFlow>(layers, shape.experts, group.engines, group.ranks);
  place::Placement at_first{.layers = layers, .experts = shape.experts, .ranks = group.ranks};
  if (group.expert_parallel->at_first) {
    at_first = *group.expert_parallel->at_first;
    if (at_first.layers != layers || at_first.experts != shape.experts || at_first.ranks != group.ranks ||
        !at_first.copies.empty()) {
      return invalid("the placement is that of another model or number of ranks, or has copies", "at_first");
    }
    if (Status good = at_first.check(shape.experts / group.ranks); !good) return good;
  } else {
    for (size_t i = 0; i < shape.cells(); ++i) {
      at_first.rank.push_back(static_cast<uint32_t>(i % shape.experts * group.ranks / shape.experts));
    }
  }
  worker.flow->place(at_first.rank);
  if (const auto& control = group.expert_parallel->control) {
    if (shape.experts % group.ranks != 0) return invalid("experts that move must divide among ranks", "ranks");
    worker.control.emplace(*control, group.engines, std::move(at_first));
    worker.window_ends_ns = std::llround(control->window_s * 1e9);
  }
  return {};
}

double ClusterRun::step_on_ranks_s(Worker& worker, Unit& unit) {
  RankFlow& flow = *worker.flow;
  flow.begin();
  for (uint32_t e = unit.first; e < unit.last; ++e) {
    worker.engines[e].for_each_planned_row(
        [&](std::span<const uint64_t> row) { flow.add_token(e, row); },
        [&](const expert::ExpertCounts& prompt, uint32_t tokens) { flow.add_chunk(e, prompt, tokens); });
  }
  flow.count();
  double longest_s = 0;
  for (StepShape& shape : shapes_) {
    shape.ranks = worker.group->ranks;
    shape.group_tokens = unit.prefill + unit.decode;
    shape.rank_copies = flow.copies();
    shape.rank_experts = flow.distinct();
    shape.link_copies = flow.link_copies();
    longest_s = std::max(longest_s, worker.group->cost->step_s(shape));
  }
  const uint32_t ranks = worker.group->ranks;
  const std::span<const uint32_t> distinct = flow.distinct();
  const size_t layer_count = distinct.size() / ranks;
  const auto layers = static_cast<double>(layer_count);
  unit.distinct = unit.worst = 0;
  for (size_t at = 0; at < distinct.size(); at += ranks) {
    const auto here = distinct.subspan(at, ranks);
    unit.worst += *std::ranges::max_element(here) / layers;
    for (const uint32_t experts : here) unit.distinct += experts / layers;
  }
  ExpertReport& report = worker.report.experts;
  report.copies += flow.all_copies();
  report.remote_copies += flow.remote_copies();
  report.busiest_copies += flow.busiest_copies();
  // A token has as many copies as it has experts in all layers.
  const double tokens = unit.prefill + unit.decode;
  std::vector<double> equivalents(ranks, 0);
  if (flow.all_copies() > 0) {
    for (uint32_t r = 0; r < ranks; ++r) equivalents[r] = tokens * flow.rank_copies(r, r + 1) / flow.all_copies();
  }
  worker.expert_load->add_ranks(equivalents, clock_.now_ns());
  return longest_s;
}

bool ClusterRun::begin_move(uint32_t at, uint32_t part) {
  Worker& worker = workers_[at];
  if (clock_.now_ns() < worker.window_ends_ns) return false;
  worker.window_ends_ns = clock_.now_ns() + std::llround(worker.control->window_s() * 1e9);
  auto move = worker.control->window(worker.flow->take_window());
  if (!move) {
    failed_ = std::move(move).error();
    return true;
  }
  if (!*move) return false;
  worker.move = **std::move(move);
  worker.units[part].busy = worker.units[part].moving = true;
  const int64_t stall_ns = std::max<int64_t>(1, std::llround(worker.move->stall_s * 1e9));
  push(clock_.now_ns() + stall_ns, {.kind = Kind::kStepEnd, .at = at, .epoch = worker.epoch, .part = part});
  return true;
}

void ClusterRun::end_move(Worker& worker, Unit& unit) {
  unit.moving = false;
  worker.flow->place(worker.move->target.rank);
  ExpertReport& report = worker.report.experts;
  ++report.migrations;
  report.moved_experts += worker.move->experts;
  report.stalled_s += worker.move->stall_s;
  worker.move.reset();
}

}  // namespace kindred::sim
