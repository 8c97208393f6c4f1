#include "router/workers.h"

#include <fmt/format.h>

#include "base/json.h"
#include "router/headers.h"
#include "router/prober.h"

namespace kindred::router {
namespace {

// A URL and a role need no more, and the rest of the body limit is for prompts.
constexpr size_t kWorkerBodyBytes = 16 * 1024;

constexpr std::string_view kDrainPath = "/workers/drain";

struct WorkerCall {
  std::string url;
  std::optional<Role> role;
  std::optional<fleet::Dialect> dialect;
};

// `drains`: the worker is known, so that only its URL is asked for.
Result<WorkerCall> read_worker_call(std::string_view body, bool drains) {
  if (body.size() > kWorkerBodyBytes) {
    return Error{ErrorCode::kTooLarge, fmt::format("the body has {} bytes; at most {}", body.size(), kWorkerBodyBytes)};
  }
  const Json root = parse_json(body);
  if (!root.is_object()) return invalid(R"(the body must be {"url": "http://host:port", "role": "decode"})");
  for (const auto& [name, value] : root.items()) {
    if (name != "url" && (drains || (name != "role" && name != "dialect"))) {
      return invalid(fmt::format("'{}' is not a field; accepted: url{}", name, drains ? "" : ", role, dialect"), name);
    }
    if (!value.is_string()) return invalid(fmt::format("{}: must be a string", name), name);
  }
  if (!root.contains("url")) return invalid("url: is required, as http://host:port", "url");
  WorkerCall call{.url = root["url"].get<std::string>(), .role = {}, .dialect = {}};
  if (drains) return call;
  call.role = parse_role(root.value("role", ""));
  if (!call.role) {
    return invalid(fmt::format("role is '{}'; accepted: prefill, decode, both", root.value("role", "")), "role");
  }
  if (root.contains("dialect")) {
    const auto name = root["dialect"].get<std::string>();
    call.dialect = fleet::parse_dialect(name);
    if (!call.dialect) {
      return invalid(fmt::format("dialect is '{}'; accepted: {}", name, fleet::kDialectNames), "dialect");
    }
  }
  return call;
}

// What became of the worker, and the status to say it with.
Result<Json> post_worker(const CorePtr& core, std::string_view body) {
  const Result<WorkerCall> call = read_worker_call(body, /*drains=*/false);
  if (!call) return call.error();
  const Result<fleet::WorkerId> id = core->add_worker(call->url, *call->role, "url", call->dialect);
  if (!id) return id.error();
  core->workers[*id].origin = Origin::kApi;
  if (!start_probing(core, *id)) {
    core->fleet.remove(*id);
    return Error{ErrorCode::kExhausted, "the router has too many background tasks to watch one more worker"};
  }
  const fleet::WorkerStatus now = core->fleet.worker_status(*id);
  core->log.info("{} added as {} worker", now.spec.url, to_string(now.spec.role));
  return Json{{"url", now.spec.url}, {"role", to_string(now.spec.role)}, {"health", fleet::to_string(now.health)}};
}

Result<Json> drain_worker(const CorePtr& core, std::string_view body) {
  const Result<WorkerCall> call = read_worker_call(body, /*drains=*/true);
  if (!call) return call.error();
  const Result<fleet::WorkerId> id = core->drain_worker(call->url);
  if (!id) return id.error();
  const fleet::WorkerStatus now = core->fleet.worker_status(*id);
  core->log.info("{} drains; {} requests in flight may finish", now.spec.url, now.in_flight);
  return Json{{"url", now.spec.url}, {"role", to_string(now.spec.role)}, {"in_flight", now.in_flight}};
}

Result<Json> delete_worker(const CorePtr& core, const net::RequestHead& head) {
  const std::optional<std::string> url = head.query_value("url");
  if (!url) return invalid("url: is required, as DELETE /workers?url=http://host:port", "url");
  const Result<fleet::WorkerId> id = core->remove_worker(*url);
  if (!id) return id.error();
  const fleet::WorkerStatus now = core->fleet.worker_status(*id);
  core->log.info("{} removed; {} requests in flight may finish", now.spec.url, now.in_flight);
  return Json{{"url", now.spec.url}, {"role", to_string(now.spec.role)}, {"in_flight", now.in_flight}};
}

std::optional<ApiError> refusal(const Core& core, const RouterOptions& options, const std::string& method,
                                bool drains) {
  if (drains && method != "POST") {
    ApiError error = api_error(invalid(fmt::format("{} answers POST", kDrainPath)));
    error.status = 405;
    error.allow = "POST";
    return error;
  }
  if (method != "POST" && method != "DELETE") {
    ApiError error = api_error(invalid("/workers answers POST and DELETE; GET /status lists the workers"));
    error.status = 405;
    error.allow = "POST, DELETE";
    return error;
  }
  if (!options.manage_workers) {
    ApiError error = api_error(invalid("workers cannot be changed here; start the router with --manage-workers"));
    error.status = 403;
    error.code = "manage_workers_off";
    return error;
  }
  if (core.draining) return no_worker("the router is shutting down");
  return std::nullopt;
}

}  // namespace

net::Task<bool> answer_workers(CorePtr core, Exchange& exchange) {
  const net::RequestHead& head = exchange.request.head;
  const bool drains = head.path() == kDrainPath;
  if (!drains && head.path() != "/workers") co_return false;
  std::optional<ApiError> refused = refusal(*core, exchange.options(), head.method, drains);
  if (refused) {
    co_await exchange.fail(*std::move(refused));
    co_return true;
  }
  const bool adds = !drains && head.method == "POST";
  const std::string& sent = exchange.request.body;
  const Result<Json> done = co_await on_control(*core, exchange.loop, [&]() -> Result<Json> {
    if (drains) return drain_worker(core, sent);
    return adds ? post_worker(core, sent) : delete_worker(core, head);
  });
  if (!done) {
    ApiError error = api_error(done.error());
    co_await exchange.fail(std::move(error));
    co_return true;
  }
  net::Headers headers;
  headers.add("Content-Type", "application/json");
  headers.add(kRequestIdHeader, exchange.id);
  const std::string body = dump_json(*done) + "\n";
  co_await exchange.answer(adds ? 201 : 200, std::move(headers), body);
  co_return true;
}

}  // namespace kindred::router
