#include "place/migration.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "place/routing.h"

namespace kindred::place {
namespace {

// A copy that is wanted where there is none yet.
struct Wanted {
  uint32_t layer = 0, expert = 0, rank = 0;
  double saves = 0;
};

class Scheduler {
 public:
  Scheduler(const Problem& problem, const Placement& target, const MigrationOptions& options)
      : layers_(problem.traffic.layers),
        ranks_(problem.ranks()),
        slots_(problem.slots()),
        options_(options),
        held_(size_t{layers_} * ranks_, slots_),
        spare_used_(ranks_, 0),
        busy_batch_(size_t{layers_} * problem.traffic.experts, 0),
        experts_(problem.traffic.experts) {
    for (uint32_t l = 0; l < layers_; ++l) {
      const auto before = problem.old.holders(l), after = target.holders(l);
      // EPLB may hold an expert twice on a rank; that is room, not a copy to be moved.
      for (uint32_t r = 0; r < ranks_; ++r) set_held(l, r, before);
      LayerRouting routing(problem, l);
      for (uint32_t e = 0; e < experts_; ++e) diff(l, e, before[e], after[e], routing);
    }
    std::stable_sort(wanted_.begin(), wanted_.end(),
                     [](const Wanted& a, const Wanted& b) { return a.saves > b.saves; });
  }

  std::vector<MigrationStep> run() {
    while (!wanted_.empty() || superfluous_ > 0) {
      begin_batch();
      bool any = drop_superfluous(/*all_but_one=*/false);
      any = take_wanted(/*spare=*/false) || any;
      any = take_wanted(/*spare=*/true) || any;
      any = any || drop_superfluous(/*all_but_one=*/true) || swap_wanted();
      KINDRED_CHECK(any);
      end_batch();
    }
    return std::move(steps_);
  }
  uint32_t batches() const { return batch_; }

 private:
  using Ranks = std::vector<uint32_t>;

  size_t cell(uint32_t l, uint32_t e) const { return size_t{l} * experts_ + e; }
  uint32_t& held(uint32_t l, uint32_t r) { return held_[size_t{l} * ranks_ + r]; }

  void set_held(uint32_t l, uint32_t r, const std::vector<Ranks>& holders) {
    uint32_t count = 0;
    for (const Ranks& list : holders) count += std::binary_search(list.begin(), list.end(), r) ? 1 : 0;
    held(l, r) = count;
  }

  void diff(uint32_t l, uint32_t e, const Ranks& before, const Ranks& after, const LayerRouting& routing) {
    holders_.push_back(before);
    Ranks& leaving = leaving_.emplace_back();
    std::set_difference(before.begin(), before.end(), after.begin(), after.end(), std::back_inserter(leaving));
    Ranks arriving;
    std::set_difference(after.begin(), after.end(), before.begin(), before.end(), std::back_inserter(arriving));
    superfluous_ += leaving.size();
    if (arriving.empty()) return;
    ExpertFlow was, will;
    routing.route(e, before, was);
    routing.route(e, after, will);
    for (const uint32_t r : arriving) {
      wanted_.push_back({.layer = l, .expert = e, .rank = r, .saves = was.communication - will.communication});
    }
  }

  void begin_batch() {
    ++batch_;
    sends_.assign(ranks_, 0);
    receives_.assign(ranks_, 0);
    freed_.clear();
  }
  void end_batch() {
    for (const Wanted& freed : freed_) {
      Ranks& holders = holders_[cell(freed.layer, freed.expert)];
      std::erase(holders, freed.rank);
      if (held(freed.layer, freed.rank)-- > slots_) --spare_used_[freed.rank];
    }
  }

  bool busy(uint32_t l, uint32_t e) const { return busy_batch_[cell(l, e)] == batch_; }
  bool link_free(uint32_t from, uint32_t to) const {
    return sends_[from] < options_.experts_per_batch && receives_[to] < options_.experts_per_batch;
  }
  void emit(StepKind kind, const Wanted& what, uint32_t from, uint32_t other = 0) {
    busy_batch_[cell(what.layer, what.expert)] = batch_;
    steps_.push_back({.kind = kind,
                      .batch = batch_ - 1,
                      .layer = what.layer,
                      .expert = what.expert,
                      .from = from,
                      .to = what.rank,
                      .other = other});
    if (kind == StepKind::kDrop) return;
    ++sends_[from];
    ++receives_[what.rank];
  }

  // Copies that the target does not have: of experts that are where they should be already, or, with `all_but_one`,
  // all but one of experts that are not.
  bool drop_superfluous(bool all_but_one) {
    bool any = false;
    for (size_t i = 0; superfluous_ > 0 && i < leaving_.size(); ++i) {
      Ranks& leaving = leaving_[i];
      const bool keep_one = leaving.size() == holders_[i].size();
      if (leaving.size() < (keep_one ? 2U : 1U) || (keep_one && !all_but_one)) continue;
      const auto l = static_cast<uint32_t>(i / experts_), e = static_cast<uint32_t>(i % experts_);
      for (size_t drop = keep_one ? 1 : 0; drop < leaving.size(); ++drop) {
        emit(StepKind::kDrop, {.layer = l, .expert = e, .rank = leaving[drop]}, leaving[drop]);
        freed_.push_back({.layer = l, .expert = e, .rank = leaving[drop]});
      }
      superfluous_ -= leaving.size() - (keep_one ? 1 : 0);
      leaving.resize(keep_one ? 1 : 0);
      any = true;
    }
    return any;
  }

  // A holder to copy from: one that is to lose the expert if there is one, as that frees its slot.
  uint32_t source_of(const Wanted& wanted) const {
    const Ranks& leaving = leaving_[cell(wanted.layer, wanted.expert)];
    for (const uint32_t r : leaving) {
      if (link_free(r, wanted.rank)) return r;
    }
    if (!leaving.empty()) return ranks_;
    for (const uint32_t r : holders_[cell(wanted.layer, wanted.expert)]) {
      if (link_free(r, wanted.rank)) return r;
    }
    return ranks_;
  }

  bool has_room(const Wanted& wanted, bool spare) {
    return spare ? spare_used_[wanted.rank] < options_.spare_experts : held(wanted.layer, wanted.rank) < slots_;
  }

  // As many as room and links allow.
  bool take_wanted(bool spare) {
    bool any = false;
    std::erase_if(wanted_, [&](const Wanted& wanted) {
      if (busy(wanted.layer, wanted.expert) || !has_room(wanted, spare)) return false;
      const uint32_t from = source_of(wanted);
      if (from == ranks_) return false;
      Ranks& leaving = leaving_[cell(wanted.layer, wanted.expert)];
      const bool moves = std::erase(leaving, from) > 0;
      emit(moves ? StepKind::kMove : StepKind::kCopy, wanted, from);
      if (moves) {
        --superfluous_;
        freed_.push_back({.layer = wanted.layer, .expert = wanted.expert, .rank = from});
      }
      add_holder(wanted.layer, wanted.expert, wanted.rank);
      if (++held(wanted.layer, wanted.rank) > slots_) ++spare_used_[wanted.rank];
      any = true;
      return true;
    });
    return any;
  }

  void add_holder(uint32_t l, uint32_t e, uint32_t r) {
    Ranks& holders = holders_[cell(l, e)];
    holders.insert(std::lower_bound(holders.begin(), holders.end(), r), r);
  }

  // Only when nothing else is possible, and then it always is: all ranks that are waited for are full, so on each is
  // an expert that is to leave it; no copy is superfluous, so such an expert has no other copy, and is waited for
  // itself. It changes places with an expert that is to leave the rank it should go to.
  bool swap_wanted() {
    bool any = false;
    for (Wanted& wanted : wanted_) {
      if (wanted.rank == ranks_ || busy(wanted.layer, wanted.expert)) continue;
      const uint32_t from = source_of(wanted);
      if (from == ranks_ || !link_free(wanted.rank, from)) continue;
      Ranks& leaving = leaving_[cell(wanted.layer, wanted.expert)];
      const uint32_t other = leaver(wanted.layer, wanted.rank);
      if (other == experts_ || std::erase(leaving, from) == 0) continue;
      swap(wanted, from, other);
      wanted.rank = ranks_;  // met
      any = true;
    }
    std::erase_if(wanted_, [&](const Wanted& wanted) { return wanted.rank == ranks_; });
    return any;
  }

  void swap(const Wanted& wanted, uint32_t from, uint32_t other) {
    const uint32_t l = wanted.layer;
    emit(StepKind::kSwap, wanted, from, other);
    busy_batch_[cell(l, other)] = batch_;
    ++sends_[wanted.rank];
    ++receives_[from];
    std::erase(holders_[cell(l, wanted.expert)], from);
    add_holder(l, wanted.expert, wanted.rank);
    std::erase(holders_[cell(l, other)], wanted.rank);
    add_holder(l, other, from);
    std::erase(leaving_[cell(l, other)], wanted.rank);
    superfluous_ -= 2;
    const auto met = std::find_if(wanted_.begin(), wanted_.end(),
                                  [&](const Wanted& w) { return w.layer == l && w.expert == other && w.rank == from; });
    if (met != wanted_.end()) {
      met->rank = ranks_;
      return;
    }
    leaving_[cell(l, other)].push_back(from);
    ++superfluous_;
  }

  // An expert that is to leave `r` and has not been touched in this batch; experts_: none.
  uint32_t leaver(uint32_t l, uint32_t r) const {
    for (uint32_t e = 0; e < experts_; ++e) {
      const Ranks& leaving = leaving_[cell(l, e)];
      if (!busy(l, e) && std::find(leaving.begin(), leaving.end(), r) != leaving.end()) return e;
    }
    return experts_;
  }

  uint32_t layers_, ranks_, slots_;
  const MigrationOptions& options_;
  std::vector<uint32_t> held_;        // [L, R]: experts there, arrivals of this batch included
  std::vector<uint32_t> spare_used_;  // [R]: experts beyond the slots of their layers
  std::vector<uint32_t> busy_batch_;  // [L, E]: the last batch the expert was part of, from 1
  uint32_t experts_;
  std::vector<Ranks> holders_, leaving_;  // [L, E]
  std::vector<Wanted> wanted_;
  size_t superfluous_ = 0;  // all of leaving_
  std::vector<MigrationStep> steps_;
  uint32_t batch_ = 0;
  std::vector<uint32_t> sends_, receives_;  // [R], in this batch
  std::vector<Wanted> freed_;               // at the end of this batch
};

// Every batch takes as long as the link that has most to carry.
void price_steps(MigrationPlan& plan, uint32_t ranks, const MigrationOptions& options) {
  std::vector<uint32_t> out, in;
  for (size_t i = 0; i < plan.steps.size();) {
    out.assign(ranks, 0);
    in.assign(ranks, 0);
    const uint32_t batch = plan.steps[i].batch;
    for (; i < plan.steps.size() && plan.steps[i].batch == batch; ++i) {
      const MigrationStep& step = plan.steps[i];
      if (step.kind == StepKind::kDrop) continue;
      const bool both = step.kind == StepKind::kSwap;
      ++out[step.from];
      ++in[step.to];
      if (both) {
        ++out[step.to];
        ++in[step.from];
      }
      plan.bytes += options.expert_bytes * (both ? 2 : 1);
    }
    const uint32_t most = std::max(*std::max_element(out.begin(), out.end()), *std::max_element(in.begin(), in.end()));
    plan.cost_s += most * options.expert_bytes / options.link_bytes_per_s;
  }
}

void judge(MigrationPlan& plan, const MigrationOptions& options) {
  if (plan.steps.empty()) {
    plan.reason = "nothing moves";
    return;
  }
  const double gain = plan.gain_s * options.windows;
  plan.pays = gain > 0 && gain >= options.margin * plan.cost_s;
  plan.reason = fmt::format("{:.3g} s gained in {:g} windows {} {:.3g} s of moving, times {:g}", gain, options.windows,
                            plan.pays ? "cover" : "do not cover", plan.cost_s, options.margin);
}

}  // namespace

std::string_view to_string(StepKind kind) {
  switch (kind) {
    case StepKind::kMove: return "move";
    case StepKind::kCopy: return "copy";
    case StepKind::kDrop: return "drop";
    case StepKind::kSwap: return "swap";
  }
  return "unknown";
}

Status MigrationOptions::check() const {
  const auto positive = [](double value, const char* field) -> Status {
    if (std::isfinite(value) && value > 0) return {};
    return invalid(fmt::format("{}; accepted: a number above 0", value), field);
  };
  if (Status good = positive(expert_bytes, "expert_bytes"); !good) return good;
  if (Status good = positive(link_bytes_per_s, "link_bytes_per_s"); !good) return good;
  if (Status good = positive(windows, "windows"); !good) return good;
  if (!(token_bytes >= 0) || !(busy_token_s >= 0) || !(margin >= 0)) {
    return invalid("token_bytes, busy_token_s and margin; accepted: 0 or more");
  }
  if (experts_per_batch < 1) return invalid("0; accepted: 1 or more", "experts_per_batch");
  return {};
}

double window_s(const Cost& cost, uint32_t ranks, const MigrationOptions& options) {
  return cost.communication * options.token_bytes / (options.link_bytes_per_s * ranks) +
         cost.max_load * options.busy_token_s;
}

Weights weights_of(const MigrationOptions& options, uint32_t ranks) {
  const double way_s = options.token_bytes / (options.link_bytes_per_s * ranks);
  const double move_s = options.expert_bytes / (options.link_bytes_per_s * ranks);
  const double unit_s = way_s > 0 ? way_s : std::max(options.busy_token_s / 2, 1e-12);
  return {.alpha = way_s / unit_s,
          .beta = options.busy_token_s / 2 / unit_s,
          .gamma = move_s * options.margin / options.windows / unit_s};
}

Result<MigrationPlan> plan_migration(const Problem& problem, const Placement& target, const MigrationOptions& options) {
  if (Status good = problem.check(); !good) return std::move(good).error();
  if (Status good = options.check(); !good) return std::move(good).error();
  if (problem.old.empty()) return invalid("there is none to move away from", "placement");
  Problem moved = problem;  // for the same checks
  moved.old = target;
  if (Status good = moved.check(); !good) return std::move(good).error();
  MigrationPlan plan;
  Scheduler scheduler(problem, target, options);
  plan.steps = scheduler.run();
  plan.batches = scheduler.batches();
  price_steps(plan, problem.ranks(), options);
  const auto seconds = [&](const Placement& placement) {
    return window_s(total(evaluate(problem, placement)), problem.ranks(), options);
  };
  plan.gain_s = seconds(problem.old) - seconds(target);
  judge(plan, options);
  return plan;
}

}  // namespace kindred::place
