#include "router/health.h"

#include <fmt/format.h>

#include "base/json.h"
#include "router/headers.h"
#include "router/models.h"

namespace kindred::router {
namespace {

Json health_json(const Core& core, std::string_view model, bool liveness) {
  const std::string reason = unserved_reason(core, model);
  Json out = {{"status", reason.empty() ? (liveness ? "ok" : "ready") : (liveness ? "not_serving" : "not_ready")}};
  if (!reason.empty()) out["reason"] = reason;
  if (core.draining) out["status"] = "draining";
  if (!model.empty()) {
    out["model"] = model;
    return out;
  }
  out["models"] = Json::object();
  for (const fleet::ServedModel& served : core.fleet.models()) {
    out["models"][served.id] = unserved_reason(core, served.id).empty();
  }
  return out;
}

}  // namespace

std::string unserved_reason(const Core& core, std::string_view model) {
  if (core.draining) return "the router is shutting down";
  const fleet::Serving serving = core.fleet.serving(model);
  if (serving.paired || serving.plain_up > 0) return {};
  const std::string of = model.empty() ? std::string() : fmt::format(" of '{}'", model);
  if (serving.prefill_up > 0 && serving.decode_up > 0) {
    return fmt::format("prefill and decode workers{} are up, but no two with the same model fingerprint", of);
  }
  if (serving.prefill_up > 0) return fmt::format("no decode worker{} is up", of);
  return fmt::format("no {}worker{} is up", serving.decode_up > 0 ? "prefill " : "", of);
}

net::Task<bool> answer_health(Core& core, Exchange& exchange) {
  const std::string_view path = exchange.request.head.path();
  const bool liveness = path == "/health";
  if (!liveness && path != "/ready") co_return false;
  const std::string asked = exchange.request.head.query_value("model").value_or("");
  const std::string model = resolve_model(core, asked);
  if (!model.empty() && !core.fleet.serving(model).known) {
    ApiError unknown = model_not_found(model, served_models_text(core));
    co_await exchange.fail(std::move(unknown));
    co_return true;
  }
  const bool alive = liveness && model.empty() && !core.draining;
  const bool good = alive || unserved_reason(core, model).empty();
  net::Headers headers;
  headers.add("Content-Type", "application/json");
  headers.add(kRequestIdHeader, exchange.id);
  const std::string body = dump_json(health_json(core, model, liveness)) + "\n";
  co_await exchange.answer(good ? 200 : 503, std::move(headers), body);
  co_return true;
}

}  // namespace kindred::router
