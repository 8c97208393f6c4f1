#include "engine/expert_controller.h"

#include <fmt/format.h>

#include <utility>

#include "base/log.h"
#include "engine/expert_ranks.h"

namespace kindred::engine {
namespace {

place::Placement to_place(const ExpertPlacement& from) {
  return {from.layers, from.experts, from.ranks, {from.rank_of.begin(), from.rank_of.end()}, {}};
}

ExpertPlacement from_place(const place::Placement& from) {
  ExpertPlacement out{from.layers, from.experts, from.ranks, {}};
  for (const uint32_t rank : from.rank) out.rank_of.push_back(static_cast<uint16_t>(rank));
  return out;
}

}  // namespace

ExpertControllerOptions cpu_controller_options(const ExpertRanks& ranks, place::Solver solver) {
  // Measured (design of the embedded engine): an expert of 1.3 to 2.4 MB moves in 0.9 to 1.5 ms, and decoding
  // reads experts at 10 to 12 GB/s. A token that has an expert for itself takes as long as reading it.
  constexpr double kMovedBytesPerS = 1.5e9, kReadBytesPerS = 12e9;
  ExpertControllerOptions options;
  options.window = ranks.options().window;
  options.rebalance.migration.expert_bytes = ranks.expert_bytes();
  options.rebalance.migration.link_bytes_per_s = kMovedBytesPerS;
  options.rebalance.migration.busy_token_s = ranks.expert_bytes() / kReadBytesPerS;
  options.rebalance.solver = solver;
  options.rebalance.always = solver == place::Solver::kEplb;
  options.weights = place::weights_of(options.rebalance.migration, ranks.ranks());
  return options;
}

ExpertController::ExpertController(ExpertRanks& ranks, const ExpertControllerOptions& options)
    : ranks_(ranks), options_(options), seen_(ranks.traffic()) {
  thread_ = std::thread([this] { run(); });
}

ExpertController::~ExpertController() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

ExpertControllerReport ExpertController::report() const {
  const std::lock_guard lock(mutex_);
  return report_;
}

void ExpertController::run() {
  std::unique_lock lock(mutex_);
  while (!wake_.wait_for(lock, options_.window, [this] { return stopping_; })) {
    lock.unlock();
    window();
    lock.lock();
  }
}

void ExpertController::window() {
  RankTraffic now = ranks_.traffic();
  RankTraffic since = now;
  subtract_traffic(since, seen_, ranks_.shape());
  seen_ = std::move(now);
  std::string reason = ranks_.progress().active ? "experts are still moving" : decide(since);
  const std::lock_guard lock(mutex_);
  ++report_.windows;
  report_.reason = std::move(reason);
}

std::string ExpertController::decide(const RankTraffic& since) {
  const RankShape& shape = ranks_.shape();
  if (since.sources == 0) return "no traffic";
  place::Placement current = to_place(ranks_.placement());
  if (!rebalancer_ || sources_ != since.sources) {
    place::Problem setup;
    auto topology = place::tiered_topology(since.sources, shape.ranks);
    if (!topology) return topology.error().message;
    setup.topology = std::move(*topology);
    setup.old = current;
    setup.weights = options_.weights;
    rebalancer_.emplace(std::move(setup), options_.rebalance);
    sources_ = since.sources;
  } else if (rebalancer_->placement() != current) {
    rebalancer_->moved_to(std::move(current));  // somebody else's placement
  }
  auto result =
      rebalancer_->window({shape.layers, since.sources, shape.experts, {since.tokens.begin(), since.tokens.end()}});
  Status done = result.ok() ? Status{} : result.error();
  if (result.ok() && result->target) {
    done = ranks_.apply(from_place(*result->target));
    if (done.ok()) {
      Logger("expert ranks").info("a new placement: {}", result->reason);
      rebalancer_->moved_to(*result->target);
    }
  }
  const std::lock_guard lock(mutex_);
  if (!done.ok()) {
    ++report_.failed;
    return done.error().message;
  }
  if (result->target) ++report_.applied;
  return result->reason;
}

}  // namespace kindred::engine
