#include "router/vllm_priority.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>

#include "base/json.h"
#include "router/core.h"
#include "router/exchange.h"

namespace kindred::router {
namespace {

constexpr size_t kPriorityReplyBytes = 1024 * 1024;
constexpr double kMostPriority = 9.0e18;  // below INT64_MAX, and exact as a double

bool wants_priority(const RouterOptions& options) {
  const PriorityMode mode = options.engines.vllm_priority;
  return mode == PriorityMode::kOn || (mode == PriorityMode::kAuto && options.engines.on);
}

// Whether the answer to the question says yes, no, or nothing of the kind.
TakesPriority priority_verdict(int status, std::string_view body) {
  if (status == 200) return TakesPriority::kOn;
  const bool refused = status == 400 && body.find("riority scheduling is not enabled") != std::string_view::npos;
  return refused ? TakesPriority::kOff : TakesPriority::kUnknown;
}

net::Task<void> ask_priority(CorePtr core, fleet::WorkerId worker, std::string model) {
  net::RequestHead head;
  head.method = "POST";
  head.target = "/v1/completions";
  head.headers.add("Content-Type", "application/json");
  const std::string body = Json{{"model", model}, {"prompt", "a"}, {"max_tokens", 1}, {"priority", 1}}.dump();
  const std::array<std::string_view, 1> parts = {body};
  net::RequestDeadlines deadlines;
  // It waits in the queue as any request does.
  deadlines.head_ms = core->settings()->options.prefill_deadline_ms;
  deadlines.read_ms = core->settings()->options.health_timeout_ms;
  auto response = co_await core->probe_client.send(core->endpoint(worker), std::move(head), parts,
                                                   core->closing.token(), deadlines);
  if (!response) {
    core->log.info("{}: does it take priorities? {}", core->endpoint(worker).url(), response.error().message);
    co_return;
  }
  const int status = (*response)->head().status;
  const Result<std::string> reply = co_await (*response)->read_all(kPriorityReplyBytes);
  if (core->fleet.removed(worker) || !core->workers[worker].priority_asked) co_return;  // it has gone meanwhile
  const TakesPriority takes = priority_verdict(status, reply ? std::string_view(*reply) : std::string_view());
  core->priorities.set(worker, takes);
  core->log.info("{}: priorities: {} (status {})", core->endpoint(worker).url(), to_string(takes), status);
}

}  // namespace

std::string_view to_string(TakesPriority takes) {
  switch (takes) {
    case TakesPriority::kUnknown: return "unknown";
    case TakesPriority::kOn: return "on";
    case TakesPriority::kOff: return "off";
  }
  return "";
}

int64_t priority_at(int64_t arrival_unix_ms, double prefill_tokens, double ms_per_token) {
  const double waits_ms = std::clamp(prefill_tokens * ms_per_token, 0.0, kMostPriority / 2);
  return arrival_unix_ms + static_cast<int64_t>(waits_ms);
}

std::optional<int64_t> leg_priority(const Core& core, const Exchange& exchange, fleet::WorkerId worker,
                                    double prefill_tokens) {
  const RouterOptions& options = exchange.options();
  if (exchange.scan.has_priority || !wants_priority(options)) return std::nullopt;
  if (core.fleet.dialect(worker) != fleet::Dialect::kVllm) return std::nullopt;
  const bool sends =
      options.engines.vllm_priority == PriorityMode::kOn || core.priorities.of(worker) == TakesPriority::kOn;
  if (!sends) return std::nullopt;
  // Routers that share a server compare by the clock on the wall.
  using std::chrono::duration_cast;
  using std::chrono::milliseconds;
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const auto ago = core.clock.now() - exchange.arrived;
  return priority_at(duration_cast<milliseconds>(now - ago).count(), prefill_tokens,
                     options.engines.priority_ms_per_token);
}

void find_out_priority(const CorePtr& core, fleet::WorkerId worker) {
  Core::Worker& entry = core->workers[worker];
  if (core->fleet.health(worker) != fleet::Health::kUp) {
    entry.priority_asked = false;
    core->priorities.set(worker, TakesPriority::kUnknown);
    return;
  }
  const SettingsPtr settings = core->settings();
  const bool asks = settings->options.engines.vllm_priority == PriorityMode::kAuto && wants_priority(settings->options);
  if (!asks || entry.priority_asked || core->fleet.dialect(worker) != fleet::Dialect::kVllm) return;
  entry.priority_asked = Core::spawn(core, ask_priority(core, worker, core->fleet.description(worker).models.front()));
}

}  // namespace kindred::router
