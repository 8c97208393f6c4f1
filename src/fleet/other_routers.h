// What other routers have sent to a worker: how many requests is known from its polled load, which experts they use is
// not. Its own requests, as far as there are some, stand for them, since other routers sort as this one does; else
// those of all workers.
//
// How many requests a worker has is polled, and old by the time it is used; and all routers see the same old figures,
// so that whoever looks least loaded gets everybody's next requests. A router's own books are always new, and where
// routers decide alike a fair sample of the whole. So the mean of both is used.
//
// Thread-safety: pure functions.
#pragma once

#include <memory>
#include <span>

#include "fleet/expert_load.h"

namespace kindred::fleet {

struct PartlyKnown {
  std::shared_ptr<const ExpertState> state;  // of the known requests; null: none
  double known = 0, requests = 0;            // of which `known` are in `state`
  std::shared_ptr<const expert::RankMap> ranks = {};
};

// Sets each worker's `requests` to the mean of itself and its share of what is known, scaled to the sum of all: known x
// sum(requests) / sum(known). Nothing known, or nobody there: as it was.
void estimate_requests(std::span<PartlyKnown> workers);

// Replaces states where at least a quarter more is there than known: q^(requests / known), to the nearest whole power
// up to 8. Those of other shapes than the first are left alone.
void add_unknown(std::span<PartlyKnown> workers);

}  // namespace kindred::fleet
