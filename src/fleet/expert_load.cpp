#include "fleet/expert_load.h"

#include <utility>

namespace kindred::fleet {

bool ExpertLoad::join(const expert::Inclusion& inclusion, int32_t choices) {
  const std::lock_guard lock(mutex_);
  integrate();
  if (requests_ == 0) {
    shape_ = inclusion.shape;
    sums_.assign(inclusion.codes.size(), 0);
  } else if (inclusion.shape != shape_) {
    return false;
  }
  requests_ += choices;
  expert::add_inclusion(inclusion.codes, choices, sums_);
  renew();
  return true;
}

void ExpertLoad::leave(const expert::Inclusion& inclusion, int32_t choices) {
  const std::lock_guard lock(mutex_);
  integrate();
  requests_ -= choices;
  expert::add_inclusion(inclusion.codes, -choices, sums_);
  renew();
}

void ExpertLoad::renew() {
  if (requests_ == 0) {
    state_.reset();
    return;
  }
  auto state = std::make_shared<ExpertState>();
  state->unused.resize(sums_.size());
  state->used = expert::unused_shares(sums_, state->unused);
  if (ranks_ && ranks_->layers() == shape_.layers.size() && ranks_->experts() == shape_.experts) {
    state->ranks = ranks_;
    state->used = expert::busiest_rank_used(*ranks_, state->unused);
  }
  state_ = std::move(state);
}

void ExpertLoad::set_ranks(std::shared_ptr<const expert::RankMap> ranks) {
  const std::lock_guard lock(mutex_);
  integrate();
  ranks_ = std::move(ranks);
  renew();
}

std::shared_ptr<const expert::RankMap> ExpertLoad::ranks() const {
  const std::lock_guard lock(mutex_);
  return ranks_;
}

// What has been up to now.
void ExpertLoad::integrate() {
  const MonotonicTime now = clock_.now();
  const double passed_s = seconds_between(since_, now);
  since_ = now;
  integrals_.seconds += passed_s;
  if (!state_) return;
  integrals_.used_s += passed_s * state_->used / static_cast<double>(shape_.layers.size());
  integrals_.requests_s += passed_s * static_cast<double>(requests_);
}

std::shared_ptr<const ExpertState> ExpertLoad::state() const {
  const std::lock_guard lock(mutex_);
  return state_;
}

ExpertSums ExpertLoad::sums() {
  const std::lock_guard lock(mutex_);
  integrate();
  return integrals_;
}

}  // namespace kindred::fleet
