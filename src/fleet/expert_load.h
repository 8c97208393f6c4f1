// What the requests in flight on one worker are expected to use of its experts: q[l,e], how likely each expert is
// unused in a step (expert/inclusion.h).
//
// Kept by LoadGuards: each adds its request from the decision to the end of the leg. Sums are whole numbers, so what
// leaves takes away exactly what it brought, and an idle worker is exactly idle, without ever being rebuilt.
//
// Memory: 8 bytes x L x E a worker that has requests, and 1 byte x L x E for each of them (at 48 x 128: 49 KiB and
// 6 KiB). Cost of joining and leaving: O(L x E).
// Thread-safety: any thread. What state() returns never changes; it is replaced.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/clock.h"
#include "expert/inclusion.h"
#include "expert/rank_union.h"

namespace kindred::fleet {

struct ExpertState {
  std::vector<float> unused;  // q [L, E]
  // Expected distinct experts of all layers together; with ranks, of each layer's busiest.
  double used = 0;
  std::shared_ptr<const expert::RankMap> ranks = {};  // that `used` is for; null: all experts on one
};

// Of a stretch of time, what a step had on average; integrals over time from some origin.
struct ExpertSums {
  double used_s = 0;      // mean distinct experts a layer, times seconds
  double requests_s = 0;  // of those in flight whose experts are known
  double seconds = 0;
};

class ExpertLoad {
 public:
  explicit ExpertLoad(const Clock& clock) : clock_(clock) {}

  // `choices` requests alike. False: not kept, since those that are there are of another shape: of a model with other
  // layers or experts.
  bool join(const expert::Inclusion& inclusion, int32_t choices);
  void leave(const expert::Inclusion& inclusion, int32_t choices);  // what has joined, once

  // Where the worker's experts are from now on; null: all on one rank. A map of another shape than the requests' is
  // kept, and counts as none.
  void set_ranks(std::shared_ptr<const expert::RankMap> ranks);
  std::shared_ptr<const expert::RankMap> ranks() const;

  std::shared_ptr<const ExpertState> state() const;  // null: nobody is there
  ExpertSums sums();                                 // up to now

 private:
  void renew();
  void integrate();

  const Clock& clock_;
  mutable std::mutex mutex_;
  expert::ExpertShape shape_;   // of those who are there
  std::vector<uint32_t> sums_;  // [L, E]
  int64_t requests_ = 0;
  std::shared_ptr<const ExpertState> state_;
  std::shared_ptr<const expert::RankMap> ranks_;
  ExpertSums integrals_;
  MonotonicTime since_{};  // up to which they reach
};

}  // namespace kindred::fleet
