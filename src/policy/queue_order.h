// Which of an engine's waiting requests is next. The same object orders the queue of the engine and of the
// simulator's engine.
//
//   fcfs       first come, first served
//   priority   lowest priority value first, as in vLLM; who is urgent enough can starve others
//   sjf-aging  shortest prefill first; who has waited longer than θ_age comes before all who have not, oldest
//              first (Gimbal, Algorithm 2)
//   hrrn       highest response ratio next: (waited + service) / service, with prefill tokens as service. How fast
//              they are computed does not matter: the order is that of waited / tokens
//
// Whoever was preempted comes before all others, oldest first. Ties go to the earlier arrival, then to the lower
// sequence number, so every order is total.
//
// No starvation under sjf-aging: once a request has waited for θ_age, only preempted requests and those that were
// there before it are picked before it, however many come later. So with a queue of at most Q it is among the next
// Q picks. Under hrrn a request of t tokens that has waited for w yields only to requests of less than t tokens
// that have waited longer per token.
//
// Costs: O(log n) per add, remove and next; next under hrrn O(n).
//
// Thread-safety: none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <string_view>
#include <tuple>
#include <unordered_map>

#include "base/result.h"

namespace kindred::policy {

enum class QueuePolicy { kFcfs, kPriority, kSjfAging, kHrrn };

std::span<const std::string_view> queue_policy_names();
// Error: kInvalid, naming what is accepted.
Result<QueuePolicy> parse_queue_policy(std::string_view name);
std::string_view to_string(QueuePolicy policy);

struct QueueOptions {
  QueuePolicy policy = QueuePolicy::kFcfs;
  int64_t age_ns = 5'000'000'000;  // θ_age; sjf-aging only
};

struct QueuedRequest {
  uint64_t sequence = 0;        // names it; no two in one queue share it
  int64_t arrival_ns = 0;       // on the clock of next()'s `now_ns`
  uint64_t prefill_tokens = 0;  // left to compute, known prefix hits taken off
  int64_t priority = 0;         // lower is sooner
  bool preempted = false;       // it ran already
};

class QueueOrder {
 public:
  explicit QueueOrder(const QueueOptions& options) : options_(options) {}

  void add(const QueuedRequest& request);
  void remove(uint64_t sequence);  // of one that is here
  void clear();

  // Sequence number of the next one, which stays in the queue; nothing if it is empty.
  std::optional<uint64_t> next(int64_t now_ns) const;

  size_t size() const { return requests_.size(); }
  bool empty() const { return requests_.empty(); }

 private:
  // Not preempted; what the policy goes by (0 where it is age alone); arrival; sequence.
  using Key = std::tuple<bool, int64_t, int64_t, uint64_t>;

  Key key_of(const QueuedRequest& request) const;
  static Key age_of(const QueuedRequest& request);
  uint64_t highest_ratio(int64_t now_ns) const;

  QueueOptions options_;
  std::unordered_map<uint64_t, QueuedRequest> requests_;
  std::set<Key> order_;
  std::set<Key> by_age_;  // sjf-aging only
};

}  // namespace kindred::policy
