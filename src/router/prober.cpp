#include "router/prober.h"

#include <fmt/format.h>

#include "fleet/describe.h"
#include "router/load_poller.h"
#include "router/prefixes.h"
#include "router/status_engines.h"

namespace kindred::router {
namespace {

constexpr size_t kHealthBytes = 64 * 1024;
constexpr size_t kModelsBytes = 1024 * 1024;
constexpr size_t kServerInfoBytes = 4 * 1024 * 1024;  // llama-server's holds its chat template, SGLang's all arguments

void failed(Core& core, fleet::WorkerId worker, std::string why) {
  if (core.fleet.report_failure(worker, why)) core.log.warn("{} is out: {}", core.endpoint(worker).url(), why);
}

struct PageAnswer {
  int status = 0;
  std::string body;  // empty if it was too long
};

net::Task<Result<PageAnswer>> ask(Core& core, fleet::WorkerId worker, std::string target, size_t limit_bytes) {
  net::RequestHead head;
  head.method = "GET";
  head.target = std::move(target);
  net::RequestDeadlines deadlines;
  deadlines.head_ms = deadlines.read_ms = core.settings()->options.health_timeout_ms;
  const std::span<const std::string_view> no_body;
  auto response =
      co_await core.probe_client.send(core.endpoint(worker), std::move(head), no_body, core.closing.token(), deadlines);
  if (!response) co_return std::move(response).error();
  PageAnswer out;
  out.status = (*response)->head().status;
  Result<std::string> body = co_await (*response)->read_all(limit_bytes);
  if (body) out.body = *std::move(body);
  co_return out;
}

// Whether the worker says that it serves. Reports to the fleet where it does not.
net::Task<bool> check_health(Core& core, fleet::WorkerId worker, bool whole) {
  std::string target = "/health";
  const Result<PageAnswer> answer = co_await ask(core, worker, std::move(target), kHealthBytes);
  if (!answer) {
    failed(core, worker, answer.error().message);
    co_return false;
  }
  const int status = answer->status;
  // Servers that are not engines (a gateway, a cloud endpoint) have no /health; their list of models must do.
  if (status == 200 || (whole && status >= 400 && status < 500)) co_return true;
  if (status == 503) {
    // It speaks for itself (loading, draining): no need to ask three times.
    const bool loading = answer->body.find("loading") != std::string::npos;
    const std::string why = loading ? "loading its model" : "says that it does not serve";
    if (core.fleet.report_out(worker, why)) core.log.warn("{} is out: {}", core.endpoint(worker).url(), why);
  } else {
    failed(core, worker, fmt::format("GET /health: status {}", status));
  }
  co_return false;
}

// Where an engine says more of itself than the list of models does. Without a known one all are tried: a proxy
// or a flag may have changed the owner's name.
std::vector<std::string> info_paths(const fleet::Description& said, std::optional<fleet::Dialect> configured) {
  const fleet::Dialect dialect = configured.value_or(said.dialect);
  if (dialect == fleet::Dialect::kSglang) return {"/get_server_info", "/server_info"};
  if (const std::string_view path = fleet::server_info_path(dialect); !path.empty()) return {std::string(path)};
  if (configured || dialect == fleet::Dialect::kKindred || said.owner == "kindred") return {};
  return {"/get_server_info", "/version", "/props"};
}

// Fills in what the engine's own endpoint says; once per life of a worker, since some of it is costly to make.
// False: it did not answer, which is a failed check.
net::Task<bool> introspect(Core& core, fleet::WorkerId worker, fleet::Description& said) {
  const fleet::WorkerStatus now = core.fleet.worker_status(worker);
  const std::optional<fleet::Dialect> configured = now.spec.dialect;
  const fleet::Description& before = now.description;
  if (now.health == fleet::Health::kUp && before.models == said.models && before.owner == said.owner) {
    fleet::complete(said, {before.dialect, before.version, before.role, before.bootstrap_port}, configured);
    co_return true;
  }
  fleet::ServerInfo info;
  for (std::string& path : info_paths(said, configured)) {
    const Result<PageAnswer> page = co_await ask(core, worker, std::move(path), kServerInfoBytes);
    if (!page) {
      failed(core, worker, page.error().message);
      co_return false;
    }
    if (page->status == 200) info = fleet::parse_server_info(page->body);
    if (info.dialect) break;
  }
  if (said.dialect != fleet::Dialect::kKindred) fleet::complete(said, info, configured);
  co_return true;
}

// Its engines' traces are read where it publishes them, from now on and for as long as anybody goes by them. One that
// is down may come back, and is heard again then.
void follow_traces(Core& core, fleet::WorkerId worker) {
  const SettingsPtr settings = core.settings();
  const RouterOptions& options = settings->options;
  std::string endpoint;
  if (looks_at_engines(options)) {
    endpoint = trace_endpoint(settings->traces, core.endpoint(worker), core.fleet.description(worker).traces);
  }
  std::string& now = core.workers[worker].traces;
  if (endpoint == now) return;
  if (endpoint.empty()) {
    core.traces.remove(worker);
  } else if (Status added = core.traces.add(worker, endpoint); !added) {
    core.log.warn("{}: traces: {}", core.endpoint(worker).url(), added.error().message);
  }
  now = std::move(endpoint);  // also where it could not be used, or each check would complain
}

net::Task<void> probe_loop(CorePtr core, fleet::WorkerId worker) {
  const auto pause = core->workers[worker].pause;
  const auto over = [&] { return core->closing.cancelled() || core->fleet.removed(worker); };
  while (!over()) {
    co_await probe(*core, worker);
    if (over()) break;
    follow_traces(*core, worker);
    find_out_priority(core, worker);
    pause->expires_after(core->settings()->options.health_interval_ms);
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
  const std::chrono::milliseconds timeout_ms = core.settings()->options.health_timeout_ms;
  Result<std::string> models = co_await core.probe_client.get(core.endpoint(worker), std::move(target), kModelsBytes,
                                                              timeout_ms, core.closing.token());
  if (!models) {
    failed(core, worker, models.error().message);
    co_return;
  }
  Result<fleet::Description> description = fleet::parse_models(*models);
  if (!description) {
    failed(core, worker, description.error().message);
    co_return;
  }
  const bool told = co_await introspect(core, worker, *description);
  if (!told) co_return;
  const std::optional<fleet::Dialect> configured = core.fleet.worker_status(worker).spec.dialect;
  if (configured == fleet::Dialect::kKindred && description->fingerprint.empty()) {
    failed(core, worker, "configured as kindred, but its models carry no `kindred` object");
    co_return;
  }
  const bool was_down = core.fleet.health(worker) == fleet::Health::kDown;
  if (!core.fleet.report_up(worker, *std::move(description))) co_return;
  const fleet::WorkerStatus now = core.fleet.worker_status(worker);
  if (now.health == fleet::Health::kUp) {
    if (was_down && core.prefixes) core.prefixes->worker_returned(worker);
    core.log.info("{} is up: {}, {}, {}", now.spec.url, to_string(now.spec.role),
                  fleet::to_string(now.description.dialect), now.description.models.front());
  } else {
    core.log.warn("{} is of no use: {}", now.spec.url, now.problem);
  }
}

bool start_probing(const CorePtr& core, fleet::WorkerId worker) {
  Core::Worker& entry = core->workers[worker];
  if (entry.probed) {
    entry.pause->cancel();  // one that had not ended when its worker was restored: check now
  } else {
    entry.probed = Core::spawn(core, probe_loop(core, worker), /*standing=*/true);
  }
  return entry.probed && start_polling(core, worker);
}

void start_probing(const CorePtr& core) {
  for (fleet::WorkerId id = 0; id < core->workers.size(); ++id) KINDRED_CHECK(start_probing(core, id));
}

}  // namespace kindred::router
