#include "engine/worker.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <random>

#include "base/bytes.h"
#include "engine/worker_impl.h"

namespace kindred::engine {

namespace asio = net::asio;
using net::Task;

namespace {

constexpr std::string_view kJson = "application/json";
constexpr std::chrono::seconds kLeaseSweep{1};
constexpr std::string_view kKvPath = "/v1/kv/";
constexpr std::string_view kKvRoute = "/v1/kv/{id}";
constexpr std::string_view kKvRenewRoute = "/v1/kv/{id}/renew";

uint64_t entropy() {
  std::random_device device;
  return (uint64_t{device()} << 32) ^ device();
}

// The path with an id in it replaced by "{id}".
std::string_view route_path(std::string_view path) {
  if (!path.starts_with(kKvPath)) return path;
  std::string_view rest = path.substr(kKvPath.size());
  const size_t slash = rest.find('/');
  if (rest.empty() || slash == 0) return path;
  if (slash == std::string_view::npos) return kKvRoute;
  return rest.substr(slash) == "/renew" ? kKvRenewRoute : path;
}

std::string lease_id(std::string_view path) {
  const std::string_view rest = path.substr(kKvPath.size());
  return std::string(rest.substr(0, rest.find('/')));
}

bool usable_request_id(const std::string_view* id) {
  return id && !id->empty() && id->size() <= 128 &&
         std::all_of(id->begin(), id->end(), [](char c) { return c > ' ' && c <= '~'; });
}

net::ServerOptions server_options(const WorkerOptions& options) {
  net::ServerOptions out;
  out.body_bytes = options.body_bytes;
  return out;
}

}  // namespace

WorkerMetrics::WorkerMetrics(Registry& registry, const std::string& model)
    : first_token(registry.histogram("vllm:time_to_first_token_seconds", "From a request's arrival to its first token.",
                                     latency_bounds_s(), {{"model_name", model}})),
      between_tokens(registry.histogram("vllm:inter_token_latency_seconds", "Between two tokens of one choice.",
                                        latency_bounds_s(), {{"model_name", model}})),
      whole_request(registry.histogram("vllm:e2e_request_latency_seconds", "From a request's arrival to its end.",
                                       latency_bounds_s(), {{"model_name", model}})),
      kv_pull(registry.histogram("kindred_kv_pull_seconds", "Fetching one request's KV from a prefill worker.",
                                 latency_bounds_s())),
      leases(registry.gauge("kindred_leases", "KV blobs that wait for a decode worker.")),
      lease_bytes(registry.gauge("kindred_lease_bytes", "Their size.")) {}

void Worker::Impl::count_request(std::string_view path, int status) {
  registry
      .counter("kindred_http_requests_total", "Requests by path and status; 499: the client left.",
               {{"path", std::string(path)}, {"status", std::to_string(status)}})
      .add();
}

Worker::Impl::Impl(asio::any_io_executor its_executor, WorkerOptions its_options, const Clock& its_clock,
                   Registry& its_registry)
    : executor(its_executor),
      options(std::move(its_options)),
      clock(its_clock),
      registry(its_registry),
      leases(clock, options.lease_bytes, options.lease_ttl),
      client(executor),
      server(executor, server_options(options),
             [this](net::Request& request, net::ResponseWriter& writer) { return handle(request, writer); }),
      random(entropy()),
      epoch(random.next() >> 11),
      lease_timer(std::make_shared<asio::steady_timer>(executor)) {}

std::span<const Worker::Impl::Route> Worker::Impl::routes() {
  static constexpr auto kRoutes = std::to_array<Route>({
      {"POST", "/v1/chat/completions", &Impl::chat},
      {"POST", "/v1/completions", &Impl::completions},
      {"GET", "/v1/models", &Impl::models},
      {"GET", "/v1/loads", &Impl::loads},
      {"POST", "/tokenize", &Impl::tokenize},
      {"POST", "/detokenize", &Impl::detokenize},
      {"GET", "/health", &Impl::health},
      {"GET", "/metrics", &Impl::metrics_page},
      {"GET", "/version", &Impl::version},
      {"GET", kKvRoute, &Impl::kv_get},
      {"POST", kKvRenewRoute, &Impl::kv_renew},
      {"POST", "/v1/kv_transfer/release", &Impl::kv_release},
      {"POST", "/reset_prefix_cache", &Impl::reset_prefix_cache},
      {"GET", "/v1/experts", &Impl::experts_get},
      {"POST", "/v1/experts/placement", &Impl::placement_post},
      {"DELETE", "/v1/experts/placement", &Impl::placement_delete},
  });
  return kRoutes;
}

Task<void> Worker::Impl::handle(net::Request& request, net::ResponseWriter& writer) {
  Exchange x{request, writer, clock.now(), {}, 0};
  const std::string_view* id = request.head.headers.find("X-Request-Id");
  x.request_id = usable_request_id(id) ? std::string(*id) : "req-" + hex64(random.next());
  const std::string_view path = route_path(request.head.path());
  co_await dispatch(x, path);
  const auto known = std::any_of(routes().begin(), routes().end(), [&](const Route& r) { return r.path == path; });
  count_request(known ? path : "other", x.status);
}

Task<void> Worker::Impl::dispatch(Exchange& x, std::string_view path) {
  std::string allowed;
  for (const Route& route : routes()) {
    if (route.path != path) continue;
    if (route.method == x.request.head.method) {
      const bool needs_model = path != "/health" && path != "/metrics" && path != "/version";
      if (needs_model && !backend) {
        const ApiError loading{503, "service_unavailable_error", "loading", {}, "the model is being loaded"};
        co_await send_error(x, loading);
        co_return;
      }
      co_await (this->*route.run)(x);
      co_return;
    }
    allowed += allowed.empty() ? "" : ", ";
    allowed += route.method;
  }
  ApiError error{
      404, "invalid_request_error", "not_found", {}, fmt::format("there is no {} here", x.request.head.path())};
  if (!allowed.empty()) {
    error.status = 405;
    error.code = "method_not_allowed";
    error.message = fmt::format("{} takes {}", path, allowed);
  }
  const std::string body = render_error(error);
  net::Headers fields = headers(x, kJson);
  if (!allowed.empty()) fields.add("Allow", allowed);
  const bool sent = co_await x.writer.send(error.status, std::move(fields), body);
  x.status = sent ? error.status : Exchange::kClientGone;
}

net::Headers Worker::Impl::headers(const Exchange& x, std::string_view type) const {
  net::Headers out;
  out.add("Content-Type", type);
  out.add("X-Request-Id", x.request_id);
  return out;
}

Task<void> Worker::Impl::send(Exchange& x, int status, std::string_view type, std::string_view body) {
  net::Headers fields = headers(x, type);
  const bool sent = co_await x.writer.send(status, std::move(fields), body);
  x.status = sent ? status : Exchange::kClientGone;
}

Task<void> Worker::Impl::send_error(Exchange& x, const ApiError& error) {
  const std::string body = render_error(error);
  co_await send(x, error.status, kJson, body);
}

RequestLimits Worker::Impl::limits() const { return {options.served_model, backend->model.info().vocabulary}; }

Task<void> Worker::Impl::health(Exchange& x) {
  if (draining) {
    co_await send(x, 503, kJson, R"({"status":"draining"})");
  } else if (!backend) {
    co_await send(x, 503, kJson, R"({"status":"loading"})");
  } else {
    co_await send(x, 200, kJson, R"({"status":"ok"})");
  }
}

Task<void> Worker::Impl::metrics_page(Exchange& x) {
  show_leases();
  show_experts();
  show_expert_pressure();
  const std::string page = registry.render();
  co_await send(x, 200, "text/plain; version=0.0.4; charset=utf-8", page);
}

Task<void> Worker::Impl::models(Exchange& x) {
  const ModelInfo& info = backend->model.info();
  const std::optional<PaceProfile>& pace = backend->engines.front()->options().pace;
  const std::string body = fmt::format(
      R"({{"object":"list","data":[{{"id":{},"object":"model","created":0,"owned_by":"kindred","max_model_len":{},)"
      R"("kindred":{{"v":1,"role":"{}","fingerprint":{},"layers":[{}],"experts":{},"top_k":{},)"
      R"("data_parallel_size":{}{}{}}}}}]}})",
      json_string(options.served_model), backend->limits.context_tokens, to_string(options.role),
      json_string(info.fingerprint), fmt::join(info.experts.layers, ","), info.experts.experts, info.experts.top_k,
      backend->engines.size(), traces ? fmt::format(R"(,"traces":{})", json_string(traces->endpoint())) : "",
      pace ? fmt::format(R"(,"paced":{})", json_string(pace->name)) : "");
  co_await send(x, 200, kJson, body);
}

Task<void> Worker::Impl::version(Exchange& x) {
  const std::string body = fmt::format(R"({{"version":{}}})", json_string(options.version));
  co_await send(x, 200, kJson, body);
}

Task<void> Worker::Impl::tokenize(Exchange& x) {
  const auto request = parse_tokenize_request(x.request.body, limits());
  if (!request) co_return co_await send_error(x, api_error(request.error()));
  auto tokens =
      request->prompt ? text_tokens(*request->prompt) : chat_tokens(request->messages, request->add_generation_prompt);
  if (!tokens) co_return co_await send_error(x, api_error(tokens.error()));
  if (request->add_special_tokens) *tokens = with_bos(std::move(*tokens));
  const std::string body = fmt::format(R"({{"count":{},"max_model_len":{},"tokens":[{}]}})", tokens->size(),
                                       backend->limits.context_tokens, fmt::join(*tokens, ","));
  co_await send(x, 200, kJson, body);
}

Task<void> Worker::Impl::detokenize(Exchange& x) {
  const auto tokens = parse_detokenize_request(x.request.body, limits());
  if (!tokens) co_return co_await send_error(x, api_error(tokens.error()));
  const std::string body = fmt::format(R"({{"prompt":{}}})", json_string(backend->model.detokenize(*tokens, true)));
  co_await send(x, 200, kJson, body);
}

Task<void> Worker::Impl::reset_prefix_cache(Exchange& x) {
  for (Engine* engine : backend->engines) engine->drop_prefix_cache();
  co_await send(x, 200, kJson, "{}");
}

Task<void> Worker::Impl::kv_get(Exchange& x) {
  const auto blob = leases.get(lease_id(x.request.head.path()));
  if (!blob) co_return co_await send_error(x, api_error(blob.error()));
  net::Headers fields = headers(x, "application/octet-stream");
  fields.add("X-Kindred-Hash", blob->hash);
  const bool sent = co_await x.writer.send(200, std::move(fields), as_text(*blob->bytes));
  x.status = sent ? 200 : Exchange::kClientGone;
}

Task<void> Worker::Impl::kv_renew(Exchange& x) {
  const auto ttl = leases.renew(lease_id(x.request.head.path()));
  if (!ttl) co_return co_await send_error(x, api_error(ttl.error()));
  const std::string body = fmt::format(R"({{"ttl_ms":{}}})", ttl->count());
  co_await send(x, 200, kJson, body);
}

Task<void> Worker::Impl::kv_release(Exchange& x) {
  const auto ids = parse_release_request(x.request.body);
  if (!ids) co_return co_await send_error(x, api_error(ids.error()));
  for (const std::string& id : *ids) leases.release(id);
  co_await send(x, 200, kJson, "{}");
}

void Worker::Impl::show_leases() {
  leases.expire();
  if (!backend) return;
  backend->metrics.leases.set(static_cast<double>(leases.count()));
  backend->metrics.lease_bytes.set(static_cast<double>(leases.bytes()));
}

// Holds the worker weakly, since it may resume after the worker's end.
Task<void> Worker::Impl::expire_leases(std::weak_ptr<Impl> weak, std::shared_ptr<asio::steady_timer> timer) {
  for (;;) {
    timer->expires_after(kLeaseSweep);
    const auto [error] = co_await timer->async_wait(net::kNoThrow);
    const std::shared_ptr<Impl> impl = weak.lock();
    if (error || !impl || impl->draining) co_return;
    impl->show_leases();
    impl->sample_rates();
  }
}

Worker::Worker(asio::any_io_executor executor, WorkerOptions options, const Clock& clock, Registry& metrics)
    : impl_(std::make_shared<Impl>(std::move(executor), std::move(options), clock, metrics)) {}

Worker::~Worker() { impl_->lease_timer->cancel(); }

Result<uint16_t> Worker::listen(const std::string& host, uint16_t port) {
  if (impl_->options.traces_port) {
    auto traces = TracePublisher::bind(impl_->executor, host, *impl_->options.traces_port, impl_->epoch, impl_->clock);
    if (!traces) return Error{traces.error().code, "traces_port: " + traces.error().message, "traces_port"};
    impl_->traces = *std::move(traces);
  }
  auto bound = impl_->server.listen(host, port);
  if (bound) asio::co_spawn(impl_->executor, Impl::expire_leases(impl_, impl_->lease_timer), asio::detached);
  return bound;
}

Status Worker::serve(const Model& model, std::span<Engine* const> engines) {
  KINDRED_CHECK(!engines.empty());
  auto chat_template = ChatTemplate::create(model.chat_template(), template_tokens(model));
  if (!chat_template) return chat_template.error();
  size_t longest = 1;
  for (uint32_t id = 0; id < model.info().vocabulary; ++id)
    longest = std::max(longest, model.piece(static_cast<Token>(id), true).size());
  if (impl_->options.served_model.empty()) impl_->options.served_model = model.info().name;
  const EngineOptions& options = engines.front()->options();
  impl_->backend.emplace(Impl::Backend{model,
                                       {engines.begin(), engines.end()},
                                       WorkerMetrics(impl_->registry, impl_->options.served_model),
                                       std::move(*chat_template),
                                       {options.context_tokens, options.kv_tokens},
                                       longest,
                                       std::vector<GenerationRate>(engines.size(), {.at = impl_->clock.now()})});
  if (const std::shared_ptr<TracePublisher>& traces = impl_->traces) {
    traces->start(static_cast<uint32_t>(engines.size()),
                  [impl = impl_.get()](uint32_t rank) { return impl->trace_of(rank); });
    for (Engine* engine : engines) {
      engine->on_change([weak = std::weak_ptr(traces)] {
        if (const auto publisher = weak.lock()) publisher->changed();
      });
    }
  }
  return {};
}

Task<void> Worker::drain(std::chrono::milliseconds deadline) {
  impl_->draining = true;
  impl_->lease_timer->cancel();
  co_await impl_->server.drain(deadline);
  if (!impl_->traces) co_return;
  impl_->traces->stop();
  if (!impl_->backend) co_return;
  for (Engine* engine : impl_->backend->engines) engine->on_change({});
}

}  // namespace kindred::engine
