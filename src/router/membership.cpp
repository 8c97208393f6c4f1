#include "router/membership.h"

#include <fmt/format.h>

#include <algorithm>

#include "router/prober.h"

namespace kindred::router {
namespace {

// The member with that URL, if there is one.
std::optional<fleet::WorkerId> member_at(const Core& core, const net::Endpoint& endpoint) {
  for (fleet::WorkerId id = 0; id < core.workers.size(); ++id) {
    if (core.workers[id].endpoint == endpoint && !core.fleet.removed(id)) return id;
  }
  return std::nullopt;
}

void take_in(const CorePtr& core, Origin origin, const fleet::WantedWorker& wanted, MembershipChange& change) {
  const Result<fleet::WorkerId> id = core->add_worker(wanted.url, wanted.role, "url", wanted.dialect);
  if (!id) {
    change.refused.push_back(id.error().message);
    return;
  }
  if (!start_probing(core, *id)) {
    core->fleet.remove(*id);
    change.refused.push_back(fmt::format("{}: too many background tasks", wanted.url));
    return;
  }
  core->workers[*id].origin = origin;
  if (wanted.draining) core->fleet.drain(*id);
  ++change.added;
}

}  // namespace

MembershipChange reconcile(const CorePtr& core, Origin origin, std::span<const fleet::WantedWorker> wanted) {
  MembershipChange change;
  std::vector<bool> stays(core->workers.size(), false);
  std::vector<const fleet::WantedWorker*> missing;
  for (const fleet::WantedWorker& worker : wanted) {
    const Result<net::Endpoint> endpoint = net::parse_endpoint(worker.url);
    if (!endpoint) {
      change.refused.push_back(fmt::format("url: '{}': {}", worker.url, endpoint.error().message));
      continue;
    }
    const auto id = member_at(*core, *endpoint);
    if (!id) {
      missing.push_back(&worker);
      continue;
    }
    const fleet::WorkerStatus now = core->fleet.worker_status(*id);
    if (core->workers[*id].origin != origin) {
      stays[*id] = true;  // somebody else's
      continue;
    }
    if (now.spec.role != worker.role || now.spec.dialect != worker.dialect) {
      missing.push_back(&worker);  // the same place, another worker: out, and in again
      continue;
    }
    stays[*id] = true;
    if (worker.draining && !now.draining) {
      core->fleet.drain(*id);
      ++change.drained;
    } else if (!worker.draining && now.draining) {
      core->fleet.restore(*id);
      ++change.added;
    } else {
      ++change.kept;
    }
  }
  for (fleet::WorkerId id = 0; id < stays.size(); ++id) {
    if (stays[id] || core->workers[id].origin != origin || core->fleet.removed(id)) continue;
    core->drop_worker(id);
    ++change.removed;
  }
  for (const fleet::WantedWorker* worker : missing) take_in(core, origin, *worker, change);
  return change;
}

}  // namespace kindred::router
