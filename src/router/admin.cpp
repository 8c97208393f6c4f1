#include "router/admin.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "base/json.h"
#include "net/percent.h"
#include "router/edge.h"
#include "router/experiment.h"
#include "router/gate.h"
#include "router/headers.h"
#include "router/health.h"
#include "router/history.h"
#include "router/models.h"
#include "router/prefixes.h"
#include "router/refitter.h"
#include "router/status_engines.h"

namespace kindred::router {
namespace {

constexpr size_t kDefaultDecisions = 16;

// Worker names come from the outside; what is not UTF-8 in them must not throw.
std::string dump(const Json& value) { return dump_json(value) + "\n"; }

// As the worker said it; null: unknown, which is not zero.
Json load_json(const fleet::WorkerStatus& worker) {
  if (!worker.load) return nullptr;
  Json out = {{"running", worker.load->running.value_or(0)},
              {"waiting", worker.load->waiting.value_or(0)},
              {"kv_usage", nullptr},
              {"age_s", worker.load_age_s}};
  if (worker.load->kv_usage) out["kv_usage"] = *worker.load->kv_usage;
  return out;
}

Json worker_json(const Core& core, const fleet::WorkerStatus& worker) {
  Json out = {
      {"url", worker.spec.url},
      {"role", to_string(worker.spec.role)},
      {"health", fleet::to_string(worker.health)},
      {"health_age_s", worker.state_age_s},
      {"in_flight", worker.in_flight},
      {"tokens_in_flight", worker.tokens_in_flight},
      {"load", load_json(worker)},
      {"engines", engines_json(worker)},
      {"dialect", nullptr},
      {"models", worker.description.models},
      {"cohort", nullptr},
  };
  if (!worker.problem.empty()) out["problem"] = worker.problem;
  if (!worker.description.models.empty()) out["dialect"] = fleet::to_string(worker.description.dialect);
  if (worker.cohort >= 0) out["cohort"] = worker.cohort;
  if (worker.breaker != fleet::BreakerState::kClosed) out["breaker"] = fleet::to_string(worker.breaker);
  if (worker.share < 1) out["share"] = worker.share;
  if (worker.removed) out["removed"] = true;
  if (worker.draining) out["draining"] = true;
  if (!worker.description.version.empty()) out["version"] = worker.description.version;
  if (worker.description.dialect == fleet::Dialect::kVllm) out["priority"] = to_string(core.priorities.of(worker.id));
  if (worker.description.dialect == fleet::Dialect::kKindred) {
    out["fingerprint"] = worker.description.fingerprint;
    if (!worker.description.paced.empty()) out["paced"] = worker.description.paced;
    out["experts"] = worker.description.shape.experts;
    out["moe_layers"] = worker.description.shape.layers.size();
  }
  return out;
}

Json policy_json(const Core& core) {
  const SettingsPtr settings = core.settings();
  const RouterOptions& options = settings->options;
  const policy::DecodePolicyOptions& decode = options.decode_policy;
  const policy::PrefillPolicyOptions& prefill = options.prefill_policy;
  return {
      {"decode", decode.name},
      {"tau", decode.tau},
      {"load_cap", decode.load_cap},
      {"tie_break", decode.tie_break},
      {"prefill", prefill.name},
      {"prefix_bytes", prefill.prefix_bytes},
      {"plain", settings->plain_policy->name()},
      {"load", fleet::to_string(options.load)},
      {"shadow", options.shadow_policy ? Json(options.shadow_policy->name) : Json(nullptr)},
  };
}

Json cohorts_json(const Core& core) {
  const auto model = core.cohorts();
  if (!model) return nullptr;
  const expert::CohortData& data = model->data();
  size_t owned = 0;
  for (const fleet::WorkerStatus& worker : core.fleet.status(/*all=*/true)) owned += worker.cohort >= 0 ? 1 : 0;
  Json out = {
      {"file", core.settings()->options.cohorts},
      {"count", owned},
      {"model", data.model},
      {"fingerprint", data.model_fingerprint},
      {"layers", data.shape.layers},
      {"kept_layers", data.greedy_layers},
      {"samples", data.samples},
      {"rho", nullptr},
  };
  if (!data.rho.empty()) out["rho"] = data.rho.back();
  return out;
}

Json refit_json(const Core& core) {
  if (!core.refitter) return nullptr;
  const RefitSettings settings = core.settings()->options.refit;
  const RefitStatus& now = core.refitter->status();
  Json out = {
      {"interval_ms", settings.interval_ms.count()},
      {"window_ms", settings.window_ms.count()},
      {"min_requests", settings.min_requests},
      {"window_requests", core.refitter->window_requests()},
      {"running", core.refitter->running()},
      {"fits", now.fits},
      {"splits", now.splits},
      {"merges", now.merges},
      {"skipped", now.skipped},
      {"failures", now.failures},
      {"last", nullptr},
      {"last_skip", nullptr},
      {"last_error", nullptr},
  };
  if (now.last) {
    out["last"] = {{"unix_s", now.last->unix_s},
                   {"duration_ms", now.last->duration_s * 1e3},
                   {"requests", now.last->requests},
                   {"shift", now.last->shift}};
  }
  if (!now.last_skip.empty()) out["last_skip"] = now.last_skip;
  if (!now.last_error.empty()) out["last_error"] = now.last_error;
  return out;
}

Json decision_json(const Core& core, const DecisionRecord& record) {
  const auto url = [&](fleet::WorkerId id) { return core.endpoint(id).url(); };
  Json out = {
      {"request_id", record.request_id},
      {"unix_s", record.unix_s},
      {"model", record.model},
      {"prefill_worker", nullptr},
      {"decode_worker", url(record.decode_worker)},
      {"policy", record.policy},
      {"reason", record.reason},
      {"fallback", record.fallback},
      {"candidates", Json::array()},
      {"scores", Json::object()},
      {"similarity", nullptr},
      {"band_size", nullptr},
      {"prompt_tokens", record.prompt_tokens},
      {"known_share", nullptr},
      {"rank", nullptr},
      {"prefill_tokens", nullptr},
      {"decision_us", record.decision_s * 1e6},
  };
  if (record.prefill_worker) {
    out["prefill_worker"] = url(*record.prefill_worker);
    out["prefill_reason"] = record.prefill_reason;
  }
  if (record.shadow_worker) out["shadow_worker"] = url(*record.shadow_worker);
  for (const fleet::WorkerId id : record.candidates) out["candidates"].push_back(url(id));
  for (const auto& [id, score] : record.scores) out["scores"][url(id)] = score;
  if (record.known_share) out["known_share"] = *record.known_share;
  if (record.rank) out["rank"] = *record.rank;
  if (record.prefill_tokens) out["prefill_tokens"] = *record.prefill_tokens;
  if (record.similarity) out["similarity"] = *record.similarity;
  if (record.band_size) out["band_size"] = *record.band_size;
  return out;
}

net::Headers headers_for(const Exchange& exchange, std::string_view content_type) {
  net::Headers out;
  out.add("Content-Type", content_type);
  out.add(kRequestIdHeader, exchange.id);
  return out;
}

constexpr std::string_view kOneModel = "/v1/models/";

net::Task<void> answer_json(Exchange& exchange, int status, std::string body) {
  co_await exchange.answer(status, headers_for(exchange, "application/json"), body);
}

// GET /v1/models/{id}: its entry of the list.
net::Task<void> answer_model(const Core& core, Exchange& exchange) {
  const std::string id = net::percent_decoded(exchange.request.head.path().substr(kOneModel.size()));
  const Json list = parse_json(models_json(core));
  for (const Json& entry : list["data"]) {
    if (entry["id"] == id) return answer_json(exchange, 200, dump(entry));
  }
  return exchange.fail(model_not_found(id, served_models_text(core)));
}

bool reads(const Exchange& exchange) {
  const std::string& method = exchange.request.head.method;
  return method == "GET" || method == "HEAD";
}

net::Task<void> refuse_method(Exchange& exchange) {
  ApiError error = api_error(invalid(fmt::format("{} answers GET", exchange.request.head.path())));
  error.status = 405;
  error.allow = "GET, HEAD";
  co_await exchange.fail(std::move(error));
}

net::Task<void> answer_status(Core& core, Exchange& exchange) {
  size_t decisions = kDefaultDecisions;
  if (const auto asked = exchange.request.head.query_value("decisions")) {
    const char* end = asked->data() + asked->size();
    const auto [at, error] = std::from_chars(asked->data(), end, decisions);
    if (error != std::errc{} || at != end) {
      ApiError wrong = api_error(invalid("'decisions' must be a whole number", "decisions"));
      co_await exchange.fail(std::move(wrong));
      co_return;
    }
  }
  // The refitter is the control loop's.
  std::string body = co_await on_control(core, exchange.loop, [&] { return status_json(core, decisions); });
  co_await answer_json(exchange, 200, std::move(body));
}

}  // namespace

std::string status_json(const Core& core, size_t decisions) {
  Json workers = Json::array();
  for (const fleet::WorkerStatus& worker : core.fleet.status()) workers.push_back(worker_json(core, worker));
  Json last = Json::array();
  for (const DecisionRecord& record : core.decisions.newest(decisions)) last.push_back(decision_json(core, record));
  const std::string reason = unserved_reason(core, {});
  return dump({
      {"v", 1},
      {"ready", reason.empty()},
      {"not_ready_reason", reason.empty() ? Json(nullptr) : Json(reason)},
      {"draining", core.draining.load()},
      {"unix_s", core.clock.unix_seconds()},
      {"requests_in_flight", core.requests_in_flight()},
      {"requests_waiting", core.gate->waiting()},
      {"workers", std::move(workers)},
      {"policy", policy_json(core)},
      {"engine_policy", engine_policy_json(core)},
      {"cohorts", cohorts_json(core)},
      {"refit", refit_json(core)},
      {"prefixes", core.prefixes ? core.prefixes->status() : Json(nullptr)},
      {"history", core.history ? core.history->status() : Json(nullptr)},
      {"decisions_total", core.decisions.total()},
      {"decisions", std::move(last)},
  });
}

net::Task<bool> answer_open(Core& core, Exchange& exchange) {
  const std::string_view path = exchange.request.head.path();
  const bool one_model = path.starts_with(kOneModel) && path.size() > kOneModel.size();
  if (path != "/v1/models" && !one_model && path != "/health" && path != "/ready") co_return false;
  if (!reads(exchange)) {
    co_await refuse_method(exchange);
  } else if (path == "/v1/models") {
    co_await answer_json(exchange, 200, models_json(core));
  } else if (one_model) {
    co_await answer_model(core, exchange);
  } else {
    co_await answer_health(core, exchange);
  }
  co_return true;
}

net::Task<bool> answer_admin(Core& core, Exchange& exchange) {
  const std::string_view path = exchange.request.head.path();
  const bool experiment = path == "/experiment" && core.experiment;
  if (path != "/metrics" && path != "/status" && !experiment) co_return false;
  if (!reads(exchange)) {
    co_await refuse_method(exchange);
  } else if (path == "/status") {
    co_await answer_status(core, exchange);
  } else if (experiment) {
    co_await answer_json(exchange, 200, dump(core.experiment->report()));
  } else {
    const bool engines = looks_at_engines(exchange.options());
    std::string body = core.metrics.render(core.fleet, engines);
    body += core.edge->metrics();
    if (engines) body += trace_metrics(core);
    if (core.prefixes) body += core.prefixes->metrics();
    if (core.history) body += core.history->metrics();
    co_await exchange.answer(200, headers_for(exchange, "text/plain; version=0.0.4"), body);
  }
  co_return true;
}

}  // namespace kindred::router
