#include "fleet/engine_ledger.h"

#include <cmath>

#include "base/rng.h"

namespace kindred::fleet {
namespace {

constexpr double kRateWindow_s = 10;  // in which an end loses 63 % of its weight

}  // namespace

uint64_t EngineLedger::begin(const EngineDispatch& dispatch) {
  const std::lock_guard lock(mutex_);
  uint64_t id = 0;
  do {
    id = mix64(seed_ ^ mix64(++begun_));
  } while (id == 0 || items_.contains(id));
  prompt_tokens_begun_ += static_cast<double>(dispatch.prefill_tokens);
  sums_.requests += dispatch.requests;
  sums_.unseen_requests += dispatch.requests;
  sums_.unseen_prefill_tokens += dispatch.prefill_tokens;
  sums_.unseen_kv_tokens += dispatch.kv_tokens;
  sums_.unanswered_requests += dispatch.requests;
  sums_.unanswered_tokens += dispatch.prefill_tokens;
  items_.emplace(id, Item{.dispatch = dispatch, .at = clock_.now()});
  return id;
}

void EngineLedger::see(Item& item) {
  if (item.seen) return;
  item.seen = true;
  sums_.unseen_requests -= item.dispatch.requests;
  sums_.unseen_prefill_tokens -= item.dispatch.prefill_tokens;
  sums_.unseen_kv_tokens -= item.dispatch.kv_tokens;
}

void EngineLedger::answer(Item& item) {
  if (item.answered) return;
  item.answered = true;
  sums_.unanswered_requests -= item.dispatch.requests;
  sums_.unanswered_tokens -= item.dispatch.prefill_tokens;
}

void EngineLedger::answered(uint64_t id) {
  const std::lock_guard lock(mutex_);
  if (const auto found = items_.find(id); found != items_.end()) answer(found->second);
}

void EngineLedger::end(uint64_t id) {
  const std::lock_guard lock(mutex_);
  const auto found = items_.find(id);
  if (found == items_.end()) return;
  see(found->second);
  answer(found->second);
  sums_.requests -= found->second.dispatch.requests;
  items_.erase(found);
  const MonotonicTime now = clock_.now();
  rate_ = decayed_rate(now) + 1 / kRateWindow_s;
  rate_at_ = now;
}

void EngineLedger::seen(std::span<const uint64_t> ids) {
  const std::lock_guard lock(mutex_);
  if (sums_.unseen_requests == 0) return;
  for (const uint64_t id : ids) {
    if (const auto found = items_.find(id); found != items_.end()) see(found->second);
  }
}

void EngineLedger::seen_before(MonotonicTime when) {
  const std::lock_guard lock(mutex_);
  if (sums_.unseen_requests == 0) return;
  for (auto& [id, item] : items_) {
    if (item.at < when) see(item);
  }
}

void EngineLedger::seen_answered() {
  const std::lock_guard lock(mutex_);
  if (sums_.unseen_requests == 0) return;
  for (auto& [id, item] : items_) {
    if (item.answered) see(item);
  }
}

double EngineLedger::decayed_rate(MonotonicTime now) const {
  return rate_ * std::exp(-seconds_between(rate_at_, now) / kRateWindow_s);
}

EngineLedger::Sums EngineLedger::sums() const {
  const std::lock_guard lock(mutex_);
  Sums out = sums_;
  if (begun_ > 0) out.mean_prompt_tokens = prompt_tokens_begun_ / static_cast<double>(begun_);
  if (rate_ > 0) out.ended_per_s = decayed_rate(clock_.now());
  return out;
}

}  // namespace kindred::fleet
