#include "router/load_poller.h"

namespace kindred::router {
namespace {

// An engine's metrics have some hundred lines; with many LoRA adapters some thousand.
constexpr size_t kLoadPageBytes = 4 * 1024 * 1024;

// Older SGLang servers and kindred workers have no /v1/loads; one of another dialect is never asked for it.
struct Paths {
  bool loads_missing = false;
};

net::Task<void> poll(Core& core, fleet::WorkerId worker, Paths& paths) {
  const fleet::Dialect dialect = core.fleet.dialect(worker);
  if (dialect == fleet::Dialect::kOpenAi) co_return;
  const bool may_have = dialect == fleet::Dialect::kSglang || dialect == fleet::Dialect::kKindred;
  const bool loads = may_have && !paths.loads_missing;
  std::string target = loads ? "/v1/loads" : "/metrics";
  const std::chrono::milliseconds timeout_ms = core.settings()->options.health_timeout_ms;
  const MonotonicTime asked = core.clock.now();
  const Result<std::string> text = co_await core.probe_client.get(core.endpoint(worker), std::move(target),
                                                                  kLoadPageBytes, timeout_ms, core.closing.token());
  if (!text) {
    if (!loads || text.error().code != ErrorCode::kNotFound) co_return;
    paths.loads_missing = true;
    co_await poll(core, worker, paths);
    co_return;
  }
  const fleet::LoadReport report = loads ? fleet::parse_sglang_loads(*text) : fleet::parse_load_metrics(dialect, *text);
  core.fleet.report_load(worker, report);
  core.fleet.report_engines(worker, report.engines, asked);
}

net::Task<void> poll_loop(CorePtr core, fleet::WorkerId worker) {
  const auto pause = core->workers[worker].poll_pause;
  const auto over = [&] { return core->closing.cancelled() || core->fleet.removed(worker); };
  const auto wake = core->closing.token().on_cancel([pause] { pause->cancel(); });
  Paths paths;
  while (!over()) {
    if (core->fleet.health(worker) == fleet::Health::kUp) co_await poll(*core, worker, paths);
    else paths = {};  // it may come back as another version
    if (over()) break;
    pause->expires_after(core->settings()->options.load_interval_ms);
    co_await pause->async_wait(net::kNoThrow);
  }
  core->workers[worker].polled = false;
}

}  // namespace

bool start_polling(const CorePtr& core, fleet::WorkerId worker) {
  Core::Worker& entry = core->workers[worker];
  if (core->settings()->options.load_interval_ms.count() == 0 || entry.polled) return true;
  entry.polled = Core::spawn(core, poll_loop(core, worker), /*standing=*/true);
  return entry.polled;
}

}  // namespace kindred::router
