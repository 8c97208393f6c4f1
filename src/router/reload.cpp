#include "router/reload.h"

#include <fmt/format.h>

#include <tuple>

#include "base/json.h"
#include "policy/kv_aware.h"
#include "router/gate.h"
#include "router/headers.h"
#include "router/membership.h"

namespace kindred::router {
namespace {

constexpr size_t kConfigBytes = 1024 * 1024;

// What a running router cannot change: sockets that are bound, sizes of what exists, tasks that run.
void check_fixed(const RouterOptions& now, const RouterOptions& next, std::vector<Error>& problems) {
  const auto fixed = [&](bool same, std::string field) {
    if (same) return;
    std::string why = fmt::format("{}: cannot change while the router runs; restart it", field);
    problems.push_back(invalid(std::move(why), std::move(field)));
  };
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
  fixed((now.load_interval_ms.count() == 0) == (next.load_interval_ms.count() == 0), "load_interval_ms");
}

// Sockets, pools, keys and logs are made once from these. Files that they name are read anew by Edge::reload().
void check_fixed_edge(const EdgeOptions& now, const EdgeOptions& next, std::vector<Error>& problems) {
  const auto limits = [](const EdgeOptions& edge) {
    return std::tuple(edge.server.head.head_bytes, edge.server.head.header_count, edge.server.connections,
                      edge.server.head_timeout_ms, edge.server.body_timeout_ms, edge.server.idle_timeout_ms,
                      edge.server.write_timeout_ms, edge.upstream.connections_per_endpoint,
                      edge.upstream.idle_per_endpoint, edge.upstream.idle_timeout_ms, edge.upstream.wait_timeout_ms,
                      edge.upstream.connect_timeout_ms);
  };
  const auto names = [](const EdgeOptions& edge) {
    return std::tuple(edge.admin_host, edge.admin_port, edge.tls_cert, edge.tls_key, edge.tls_client_ca,
                      edge.api_keys_file, edge.access_log, edge.access_log_file, edge.otlp_endpoint, edge.trace_sample);
  };
  if (limits(now) != limits(next)) {
    problems.push_back(
        invalid("limits and timeouts of connections cannot change while the router runs; restart it", "connections"));
  }
  if (names(now) != names(next)) {
    problems.push_back(
        invalid("the admin listener, TLS, keys, access log and traces cannot be set up anew while the "
                "router runs; restart it (the contents of their files may change)",
                "admin_port"));
  }
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
