#include "policy/queue_order.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <limits>

namespace kindred::policy {
namespace {

// By value of QueuePolicy.
constexpr auto kQueueNames = std::to_array<std::string_view>({"fcfs", "priority", "sjf-aging", "hrrn"});

}  // namespace

std::span<const std::string_view> queue_policy_names() { return kQueueNames; }

std::string_view to_string(QueuePolicy policy) { return kQueueNames[static_cast<size_t>(policy)]; }

Result<QueuePolicy> parse_queue_policy(std::string_view name) {
  const auto found = std::ranges::find(kQueueNames, name);
  if (found != kQueueNames.end()) return static_cast<QueuePolicy>(found - kQueueNames.begin());
  return invalid(fmt::format("queue_policy: '{}'; accepted: {}", name, fmt::join(kQueueNames, ", ")), "queue_policy");
}

QueueOrder::Key QueueOrder::age_of(const QueuedRequest& request) {
  return {!request.preempted, 0, request.arrival_ns, request.sequence};
}

QueueOrder::Key QueueOrder::key_of(const QueuedRequest& request) const {
  Key key = age_of(request);
  if (request.preempted) return key;
  constexpr uint64_t kMost = std::numeric_limits<int64_t>::max();
  if (options_.policy == QueuePolicy::kPriority) std::get<1>(key) = request.priority;
  if (options_.policy == QueuePolicy::kSjfAging) {
    std::get<1>(key) = static_cast<int64_t>(std::min(request.prefill_tokens, kMost));
  }
  return key;
}

void QueueOrder::add(const QueuedRequest& request) {
  KINDRED_CHECK(requests_.emplace(request.sequence, request).second);
  order_.insert(key_of(request));
  if (options_.policy == QueuePolicy::kSjfAging) by_age_.insert(age_of(request));
}

void QueueOrder::remove(uint64_t sequence) {
  const auto found = requests_.find(sequence);
  KINDRED_CHECK(found != requests_.end());
  order_.erase(key_of(found->second));
  by_age_.erase(age_of(found->second));
  requests_.erase(found);
}

void QueueOrder::clear() {
  requests_.clear();
  order_.clear();
  by_age_.clear();
}

std::optional<uint64_t> QueueOrder::next(int64_t now_ns) const {
  if (requests_.empty()) return std::nullopt;
  if (options_.policy == QueuePolicy::kHrrn) return highest_ratio(now_ns);
  if (options_.policy == QueuePolicy::kSjfAging) {
    // If anybody has aged, the oldest has; who was preempted stands at the front of both.
    const auto& [fresh, unused, arrival_ns, oldest] = *by_age_.begin();
    if (!fresh || now_ns - arrival_ns > options_.age_ns) return oldest;
  }
  return std::get<3>(*order_.begin());
}

uint64_t QueueOrder::highest_ratio(int64_t now_ns) const {
  const auto& [fresh, unused, arrival_ns, oldest] = *order_.begin();  // by age
  if (!fresh) return oldest;
  // One number for each, so that the order is transitive whatever is rounded; ties go to the older one.
  double best = -1;
  uint64_t chosen = oldest;
  for (const Key& key : order_) {
    const QueuedRequest& request = requests_.at(std::get<3>(key));
    const auto waited_ns = static_cast<double>(std::max<int64_t>(0, now_ns - request.arrival_ns));
    const double ratio = waited_ns / static_cast<double>(std::max<uint64_t>(1, request.prefill_tokens));
    if (ratio <= best) continue;
    best = ratio;
    chosen = request.sequence;
  }
  return chosen;
}

}  // namespace kindred::policy
