#include "router/prober.h"

#include <fmt/format.h>

#include "fleet/describe.h"
#include "router/prefixes.h"

namespace kindred::router {
namespace {

constexpr size_t kHealthBytes = 64 * 1024;
constexpr size_t kModelsBytes = 1024 * 1024;

void failed(Core& core, fleet::WorkerId worker, std::string why) {
  if (core.fleet.report_failure(worker, why)) core.log.warn("{} is out: {}", core.endpoint(worker).url(), why);
}

// Whether the worker says that it serves. Reports to the fleet where it does not.
net::Task<bool> check_health(Core& core, fleet::WorkerId worker, bool whole) {
  net::RequestHead head;
  head.method = "GET";
  head.target = "/health";
  net::RequestDeadlines deadlines;
  deadlines.head_ms = core.options.health_timeout_ms;
  deadlines.read_ms = core.options.health_timeout_ms;
  const std::span<const std::string_view> no_body;
  auto response =
      co_await core.probe_client.send(core.endpoint(worker), std::move(head), no_body, core.closing.token(), deadlines);
  if (!response) {
    failed(core, worker, response.error().message);
    co_return false;
  }
  const int status = (*response)->head().status;
  const Result<std::string> body = co_await (*response)->read_all(kHealthBytes);
  // Servers that are not engines (a gateway, a cloud endpoint) have no /health; their list of models must do.
  if (status == 200 || (whole && status >= 400 && status < 500)) co_return true;
  if (status == 503) {
    // It speaks for itself (loading, draining): no need to ask three times.
    const bool loading = body.ok() && body->find("loading") != std::string::npos;
    const std::string why = loading ? "loading its model" : "says that it does not serve";
    if (core.fleet.report_out(worker, why)) core.log.warn("{} is out: {}", core.endpoint(worker).url(), why);
  } else {
    failed(core, worker, fmt::format("GET /health: status {}", status));
  }
  co_return false;
}

net::Task<void> probe_loop(CorePtr core, fleet::WorkerId worker) {
  const auto pause = core->workers[worker].pause;
  const auto over = [&] { return core->closing.cancelled() || core->fleet.removed(worker); };
  while (!over()) {
    co_await probe(*core, worker);
    if (over()) break;
    pause->expires_after(core->options.health_interval_ms);
    co_await pause->async_wait(net::kNoThrow);
  }
  core->workers[worker].probed = false;
}

}  // namespace

net::Task<void> probe(Core& core, fleet::WorkerId worker) {
  const bool whole = core.fleet.role(worker) == Role::kBoth;
  const bool serves = co_await check_health(core, worker, whole);
  if (!serves) co_return;
  std::string target = "/v1/models";
  Result<std::string> models = co_await core.probe_client.get(core.endpoint(worker), std::move(target), kModelsBytes,
                                                              core.options.health_timeout_ms, core.closing.token());
  if (!models) {
    failed(core, worker, models.error().message);
    co_return;
  }
  Result<fleet::Description> description = fleet::parse_models(*models);
  if (!description) {
    failed(core, worker, description.error().message);
    co_return;
  }
  const bool was_down = core.fleet.health(worker) == fleet::Health::kDown;
  if (!core.fleet.report_up(worker, *std::move(description))) co_return;
  const fleet::WorkerStatus now = core.fleet.worker_status(worker);
  if (now.health == fleet::Health::kUp) {
    if (was_down && core.prefixes) core.prefixes->worker_returned(worker);
    core.log.info("{} is up: {}, {}", now.spec.url, to_string(now.spec.role), now.description.models.front());
  } else {
    core.log.warn("{} is of no use: {}", now.spec.url, now.problem);
  }
}

bool start_probing(const CorePtr& core, fleet::WorkerId worker) {
  Core::Worker& entry = core->workers[worker];
  if (entry.probed) {
    entry.pause->cancel();  // one that had not ended when its worker was restored: check now
    return true;
  }
  entry.probed = Core::spawn(core, probe_loop(core, worker), /*standing=*/true);
  return entry.probed;
}

void start_probing(const CorePtr& core) {
  for (fleet::WorkerId id = 0; id < core->workers.size(); ++id) KINDRED_CHECK(start_probing(core, id));
}

}  // namespace kindred::router
