// What one leg holds of its worker, from the decision to its end.

#include <algorithm>

#include "fleet/fleet.h"

namespace kindred::fleet {
namespace {

constexpr uint64_t kFewestTokens = 8;  // that tell a step's time

// As far as experts go: a request may ask for a thousand choices, which would all use the same few.
int32_t expert_choices(LegLoad load) { return static_cast<int32_t>(std::clamp<int64_t>(load.requests, 1, 64)); }

}  // namespace

LoadGuard::LoadGuard(std::shared_ptr<Ledger> ledger, LegLoad load, bool probe)
    : ledger_(std::move(ledger)), load_(load), probe_(probe) {
  ledger_->requests.fetch_add(load_.requests, std::memory_order_relaxed);
  ledger_->tokens.fetch_add(load_.tokens, std::memory_order_relaxed);
  if (probe_) ledger_->probes.fetch_add(1, std::memory_order_relaxed);
}

LoadGuard& LoadGuard::operator=(LoadGuard&& other) noexcept {
  if (this != &other) {
    release();
    ledger_ = std::move(other.ledger_);
    load_ = other.load_;
    probe_ = other.probe_;
    engine_ = std::move(other.engine_);
    dispatch_ = other.dispatch_;
    experts_ = std::move(other.experts_);
    inclusion_ = std::move(other.inclusion_);
    began_ = other.began_;
    steps_ = std::move(other.steps_);
    worker_ = other.worker_;
  }
  return *this;
}

void LoadGuard::answered() {
  if (engine_) engine_->answered(dispatch_);
}

void LoadGuard::release() {
  if (!ledger_) return;
  // Before the ledger: whoever sees the count go down finds the experts gone, too.
  if (experts_) experts_->leave(*inclusion_, expert_choices(load_));
  experts_.reset();
  inclusion_.reset();
  ledger_->requests.fetch_sub(load_.requests, std::memory_order_relaxed);
  ledger_->tokens.fetch_sub(load_.tokens, std::memory_order_relaxed);
  if (probe_) ledger_->probes.fetch_sub(1, std::memory_order_relaxed);
  ledger_.reset();
  if (engine_) engine_->end(dispatch_);
  engine_.reset();
}

void LoadGuard::decoded(uint64_t tokens, double seconds) {
  if (!experts_ || tokens < kFewestTokens) return;
  const ExpertSums now = experts_->sums();
  const double passed_s = now.seconds - began_.seconds;
  if (!(passed_s > 0)) return;
  steps_->observe(worker_, (now.used_s - began_.used_s) / passed_s, (now.requests_s - began_.requests_s) / passed_s,
                  seconds / static_cast<double>(tokens));
}

LoadGuard Fleet::take(WorkerId id, LegLoad load) {
  const std::lock_guard lock(mutex_);
  const Worker& worker = at(id);
  const bool probe = worker.breaker.state(options_.breaker, clock_.now()) == BreakerState::kHalfOpen;
  return LoadGuard(worker.ledger, load, probe);
}

LoadGuard Fleet::take(WorkerId id, LegLoad load, std::shared_ptr<const expert::Inclusion> inclusion) {
  LoadGuard guard = take(id, load);
  if (!inclusion) return guard;
  std::shared_ptr<ExpertLoad> experts;
  {
    const std::lock_guard lock(mutex_);
    experts = at(id).experts;
  }
  if (!experts->join(*inclusion, expert_choices(load))) return guard;
  guard.began_ = experts->sums();
  guard.experts_ = std::move(experts);
  guard.inclusion_ = std::move(inclusion);
  guard.steps_ = steps_;
  guard.worker_ = id;
  return guard;
}

}  // namespace kindred::fleet
