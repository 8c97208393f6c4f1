#include "router/reload.h"

#include <fmt/format.h>

#include <tuple>

#include "base/json.h"
#include "policy/kv_aware.h"
#include "router/edge.h"
#include "router/gate.h"
#include "router/headers.h"
#include "router/membership.h"

namespace kindred::router {
namespace {

constexpr size_t kConfigBytes = 1024 * 1024;

// Notes the field of what differs and cannot.
class Fixed {
 public:
  explicit Fixed(std::vector<Error>& problems) : problems_(problems) {}
  void operator()(bool same, std::string field) const {
    if (same) return;
    std::string why = fmt::format("{}: cannot change while the router runs; restart it", field);
    problems_.push_back(invalid(std::move(why), std::move(field)));
  }

 private:
  std::vector<Error>& problems_;
};

// What a running router cannot change: sockets that are bound, sizes of what exists, tasks that run.
void check_fixed(const RouterOptions& now, const RouterOptions& next, std::vector<Error>& problems) {
  const Fixed fixed(problems);
  fixed(now.host == next.host, "host");
  fixed(now.port == next.port, "port");
  fixed(now.threads == next.threads, "threads");
  fixed(now.cohorts == next.cohorts, "cohorts");
  fixed(now.refit.on == next.refit.on, "refit");
  fixed(now.decisions == next.decisions, "decisions");
  fixed(now.body_bytes == next.body_bytes, "body_bytes");
  fixed(now.manage_workers == next.manage_workers, "manage_workers");
  fixed(now.workers_file == next.workers_file, "workers_file");
  fixed(now.kubernetes_services == next.kubernetes_services, "kubernetes_service");
  fixed(now.kubernetes_api == next.kubernetes_api, "kubernetes_api");
  fixed(now.kubernetes_token_file == next.kubernetes_token_file, "kubernetes_token_file");
  // Policies that take turns or have a shadow are made together; what they ask of workers is set up at the start.
  if (!now.experiment.arms.empty()) fixed(now.engines.on == next.engines.on, "engine_policy");
  fixed(now.experiment.arms.size() == next.experiment.arms.size(), "experiment");
  fixed(now.shadow_policy.has_value() == next.shadow_policy.has_value(), "shadow_policy");
  if (!now.experiment.arms.empty() || now.shadow_policy) {
    fixed(now.prefill_policy == next.prefill_policy, "prefill_policy");
    fixed(now.decode_policy == next.decode_policy, "decode_policy");
  }
  const auto by_prefix = [](const RouterOptions& of) { return of.prefill_policy.name == policy::kKvAwareName; };
  fixed(by_prefix(now) == by_prefix(next), "prefill_policy");
  fixed((now.decode_policy.held_weight > 0) == (next.decode_policy.held_weight > 0), "held_weight");
  fixed(now.history.shapes == next.history.shapes, "history_shape");
  fixed(now.history.bytes == next.history.bytes, "history_bytes");
  fixed((now.load_interval_ms.count() == 0) == (next.load_interval_ms.count() == 0), "load_interval_ms");
}

// Listeners and pools are made once from these. Files that they name are read anew by Edge::reload().
void check_fixed_edge(const EdgeOptions& now, const EdgeOptions& next, std::vector<Error>& problems) {
  const Fixed fixed(problems);
  const net::ServerOptions &server = now.server, &next_server = next.server;
  fixed(server.head.head_bytes == next_server.head.head_bytes, "head_bytes");
  fixed(server.head.header_count == next_server.head.header_count, "headers");
  fixed(server.connections == next_server.connections, "connections");
  fixed(server.head_timeout_ms == next_server.head_timeout_ms, "head_timeout_ms");
  fixed(server.body_timeout_ms == next_server.body_timeout_ms, "body_timeout_ms");
  fixed(server.idle_timeout_ms == next_server.idle_timeout_ms, "idle_timeout_ms");
  fixed(server.write_timeout_ms == next_server.write_timeout_ms, "write_timeout_ms");
  const net::ClientOptions &upstream = now.upstream, &next_upstream = next.upstream;
  fixed(upstream.connections_per_endpoint == next_upstream.connections_per_endpoint, "upstream_connections");
  fixed(upstream.idle_per_endpoint == next_upstream.idle_per_endpoint, "upstream_idle_connections");
  fixed(upstream.idle_timeout_ms == next_upstream.idle_timeout_ms, "upstream_idle_ms");
  fixed(upstream.wait_timeout_ms == next_upstream.wait_timeout_ms, "upstream_wait_ms");
  fixed(upstream.connect_timeout_ms == next_upstream.connect_timeout_ms, "upstream_connect_ms");
  fixed(now.admin_host == next.admin_host, "admin_host");
  fixed(now.admin_port == next.admin_port, "admin_port");
  fixed(now.tls_cert == next.tls_cert, "tls_cert");
  fixed(now.tls_key == next.tls_key, "tls_key");
  fixed(now.tls_client_ca == next.tls_client_ca, "tls_client_ca");
  fixed(now.api_keys_file == next.api_keys_file, "api_keys_file");
  fixed(now.otlp_endpoint == next.otlp_endpoint, "otlp_endpoint");
  fixed(now.trace_sample == next.trace_sample, "trace_sample");
}

bool same_access_log(const EdgeOptions& a, const EdgeOptions& b) {
  return a.access_log == b.access_log && a.access_log_file == b.access_log_file;
}

// Policies with state of their own are kept unless their settings change.
struct NewParts {
  std::unique_ptr<policy::PrefillPolicy> prefill;
  std::unique_ptr<policy::DecodePolicy> decode, plain;
  std::shared_ptr<policy::EnginePolicy> engine;
  TraceSources traces;
  ModelAliases aliases;
  RetryStatuses retry_on;
  std::vector<fleet::WantedWorker> workers;
  std::shared_ptr<AccessLog> access_log;  // only if it changes
};

NewParts make_parts(const CorePtr& core, const RouterOptions& next, std::vector<Error>& problems) {
  NewParts out;
  // A policy calls its own name `name`; options say whose.
  const auto note = [&](Error error, std::string_view name = {}) {
    if (error.field == "name") error.field = name;
    problems.push_back(std::move(error));
  };
  if (auto made = policy::make_prefill_policy(next.prefill_policy)) out.prefill = *std::move(made);
  else note(std::move(made).error(), "prefill_policy");
  if (auto made = make_decode_policies(next.decode_policy)) std::tie(out.decode, out.plain) = *std::move(made);
  else note(std::move(made).error(), "decode_policy");
  if (out.decode && core->refitter && !out.decode->wants_counts()) {
    note(invalid(
        fmt::format("refit: the decode policy '{}' uses no cohorts; accepted: locality-band", out.decode->name()),
        "refit"));
  }
  if (auto made = make_engine_policy(next.engines)) out.engine = *std::move(made);
  else note(std::move(made).error(), "engine_policy");
  if (auto made = parse_trace_sources(next.engines.traces)) out.traces = *std::move(made);
  else note(std::move(made).error());
  if (auto made = ModelAliases::parse(next.model_aliases)) out.aliases = *std::move(made);
  else note(std::move(made).error());
  if (auto made = RetryStatuses::parse(next.retry_on)) out.retry_on = *made;
  else note(std::move(made).error());
  for (Error& error : wanted_workers(next, out.workers)) note(std::move(error));
  const EdgeOptions& edge = next.edge;
  if (edge.access_log != AccessLogFormat::kNone && !same_access_log(core->settings()->options.edge, edge)) {
    if (auto opened = AccessLog::open(edge.access_log, edge.access_log_file)) out.access_log = *std::move(opened);
    else note(std::move(opened).error());
  }
  return out;
}

}  // namespace

std::vector<Error> apply_options(const CorePtr& core, RouterOptions next) {
  std::vector<Error> problems;
  const SettingsPtr now = core->settings();
  check_fixed(now->options, next, problems);
  check_fixed_edge(now->options.edge, next.edge, problems);
  NewParts parts = make_parts(core, next, problems);
  if (!problems.empty()) return problems;
  // From here on nothing fails, and nothing waits.
  const auto settings = std::make_shared<Settings>(*now);
  if (next.prefill_policy != now->options.prefill_policy) settings->prefill_policy = lock(std::move(parts.prefill));
  if (next.decode_policy != now->options.decode_policy) {
    settings->decode_policy = lock(std::move(parts.decode));
    settings->plain_policy = lock(std::move(parts.plain));
  }
  const EngineOptions& engines = now->options.engines;
  if (next.engines.on != engines.on || next.engines.policy != engines.policy) {
    settings->engine_policy = std::move(parts.engine);
  }
  settings->traces = std::move(parts.traces);
  settings->aliases = std::move(parts.aliases);
  settings->retry_on = parts.retry_on;
  // Requests under way write their line where it is now.
  if (!same_access_log(now->options.edge, next.edge)) core->edge->set_access_log(std::move(parts.access_log));
  settings->options = std::move(next);
  core->gate->set_options(gate_options(settings->options));
  core->room.set_limit(settings->options.decode_inflight);
  core->fleet.set_options(fleet_options(settings->options));
  core->set_settings(settings);
  const MembershipChange change = reconcile(core, Origin::kConfig, parts.workers);
  for (const std::string& why : change.refused) core->log.warn("reload: {}", why);
  return {};
}

std::vector<Error> reload(const CorePtr& core, std::optional<std::string_view> yaml) {
  if (!core->config) return {invalid("there is no configuration to read again")};
  RouterOptions next;
  std::vector<Error> problems = core->config->read(yaml, next);
  if (problems.empty()) problems = apply_options(core, std::move(next));
  core->metrics.reloaded(problems.empty());
  if (problems.empty()) {
    core->config->accept();
    core->log.info("the new configuration runs");
  }
  for (const Error& problem : problems) core->log.warn("new configuration refused: {}", problem.message);
  return problems;
}

net::Task<bool> answer_config(CorePtr core, Exchange& exchange) {
  const net::RequestHead& head = exchange.request.head;
  if (head.path() != "/config") co_return false;
  const bool put = head.method == "PUT";
  std::optional<ApiError> refused;
  if (!put && head.method != "GET" && head.method != "HEAD") {
    refused = api_error(invalid("/config answers GET and PUT"));
    refused->status = 405;
    refused->allow = "GET, HEAD, PUT";
  } else if (!core->config) {
    refused = api_error(Error{ErrorCode::kNotFound, "this router has no configuration to show"});
  } else if (put && !exchange.options().manage_workers) {
    refused = api_error(invalid("the configuration cannot be changed here; start the router with --manage-workers"));
    refused->status = 403;
    refused->code = "manage_workers_off";
  } else if (put && exchange.request.body.size() > kConfigBytes) {
    refused = api_error(Error{ErrorCode::kTooLarge, fmt::format("a configuration has at most {} bytes", kConfigBytes)});
  }
  if (refused) {
    co_await exchange.fail(*std::move(refused));
    co_return true;
  }
  std::vector<Error> problems;
  std::string body = co_await on_control(*core, exchange.loop, [&] {
    if (put) problems = reload(core, exchange.request.body);
    return core->config->running() + "\n";
  });
  net::Headers headers;
  headers.add("Content-Type", "application/json");
  headers.add(kRequestIdHeader, exchange.id);
  if (!problems.empty()) {
    // The usual error object for the first one, and all of them beside it.
    ApiError first = api_error(problems.front());
    Json root = parse_json(error_json(first));
    root["error"]["reasons"] = Json::array();
    for (const Error& problem : problems) {
      root["error"]["reasons"].push_back({{"field", problem.field}, {"message", problem.message}});
    }
    body = dump_json(root) + "\n";
  }
  co_await exchange.answer(problems.empty() ? 200 : 400, std::move(headers), body);
  co_return true;
}

}  // namespace kindred::router
