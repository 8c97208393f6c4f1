// Who is in the fleet, by several lists at once: the configuration, calls to /workers, a watched file, Kubernetes.
// Each list rules over what it brought in and over nothing else.
//
// Thread-safety: confined to the control loop (router/core.h).
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "fleet/worker_list.h"
#include "router/core.h"

namespace kindred::router {

struct MembershipChange {
  size_t added = 0, removed = 0, drained = 0, kept = 0;
  std::vector<std::string> refused;  // why an entry could not be taken; the others are
};

// Makes the workers that `origin` brought in those of `wanted`. What is in the list already keeps its state and
// its requests; what is not in it any more finishes what it has. A worker of another origin is left alone.
MembershipChange reconcile(const CorePtr& core, Origin origin, std::span<const fleet::WantedWorker> wanted);

// Starts the tasks that keep the lists of the options up to date: --workers-file, --kubernetes-service, and the
// addresses behind names.
void start_watching(const CorePtr& core);

}  // namespace kindred::router
