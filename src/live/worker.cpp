#include "live/worker.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/bytes.h"

namespace kindred::live {
namespace {

net::Headers typed(std::string_view type) {
  net::Headers out;
  out.add("Content-Type", type);
  return out;
}

ApiFailure no_page(const std::string& path) {
  ApiFailure out = api_failure({ErrorCode::kNotFound, "nothing here: " + path});
  out.code = "not_found";
  return out;
}

constexpr std::string_view kKvPath = "/v1/kv/";
constexpr std::string_view kRenew = "/renew";

}  // namespace

LiveWorker::LiveWorker(net::asio::any_io_executor executor, std::shared_ptr<Site> site, uint32_t number)
    : executor_(std::move(executor)),
      site_(std::move(site)),
      number_(number),
      loop_(std::make_shared<WorkerLoop>(executor_, spec().loop, site_->process->shape())),
      port_(site_->options.port == 0 ? uint16_t{0} : static_cast<uint16_t>(site_->options.port + number)) {
  loop_->start();
}

Result<uint16_t> LiveWorker::listen() {
  const LiveOptions& options = site_->options;
  if (options.kv_events_port && spec().loop.engine.kv.cache && !publisher_) {
    const uint16_t first = *options.kv_events_port;
    const auto port = first == 0 ? uint16_t{0} : static_cast<uint16_t>(first + 2 * number_);
    auto made = KvPublisher::bind(site_->zmq, options.host, port, spec().loop.engine.kv.piece_tokens, site_->clock);
    if (!made) return std::move(made).error();
    publisher_ = *std::move(made);
    loop_->listen(publisher_->listener());
  }
  auto server = std::make_unique<net::HttpServer>(
      executor_, net::ServerOptions{}, [weak = weak_from_this()](net::Request& request, net::ResponseWriter& writer) {
        return serve(weak.lock(), request, writer);
      });
  const Result<uint16_t> port = server->listen(site_->options.host, port_);
  if (!port) return port;
  port_ = *port;
  server_ = std::move(server);
  return port;
}

net::Task<void> LiveWorker::kill() {
  if (!server_) co_return;
  loop_->kill();
  const std::unique_ptr<net::HttpServer> server = std::exchange(server_, nullptr);
  co_await server->drain(std::chrono::milliseconds(0));
}

Status LiveWorker::revive() {
  if (server_) return {};
  const Result<uint16_t> port = listen();
  if (!port) return port.error();
  loop_->revive();
  return {};
}

net::Task<void> LiveWorker::drain(std::chrono::milliseconds deadline) {
  const std::unique_ptr<net::HttpServer> server = std::exchange(server_, nullptr);
  if (server) co_await server->drain(deadline);
  loop_->stop();
}

net::Task<void> LiveWorker::serve(std::shared_ptr<LiveWorker> self, net::Request& request,
                                  net::ResponseWriter& writer) {
  if (!self) co_return writer.abort();
  if (request.head.method == "GET") co_return co_await self->get(request, writer);
  if (request.head.method == "POST") co_return co_await self->post(request, writer);
  ApiFailure wrong;
  wrong.status = 405;
  wrong.type = "invalid_request_error";
  wrong.code = "method_not_allowed";
  wrong.message = "accepted: GET, POST";
  co_await self->fail(writer, wrong);
}

net::Task<void> LiveWorker::get(net::Request& request, net::ResponseWriter& writer) {
  const std::string path(request.head.path());
  const fleet::Dialect dialect = site_->options.dialect;
  const bool sglang = dialect == fleet::Dialect::kSglang;
  std::string page, type = "application/json";
  if (path == "/health") page = R"({"status":"ok"})";
  else if (path == "/v1/models") page = models_page();
  else if (path == "/version" && dialect == fleet::Dialect::kVllm)
    page = dump_json(Json{{"version", site_->options.version}});
  else if ((path == "/get_server_info" || path == "/server_info") && sglang) page = server_info_page();
  else if (path == "/metrics") {
    page = metrics_page();
    type = "text/plain; version=0.0.4";
  } else if (path.starts_with(kKvPath) && site_->leases.find(path.substr(kKvPath.size())) != nullptr) {
    page = path.substr(kKvPath.size());
    type = "application/octet-stream";
  }
  if (page.empty()) {
    const ApiFailure missing = no_page(path);
    co_return co_await fail(writer, missing);
  }
  net::Headers fields = typed(type);
  if (path.starts_with(kKvPath)) fields.add("X-Kindred-Hash", blob_hash(page));
  co_await writer.send(200, std::move(fields), page);
}

net::Task<void> LiveWorker::post(net::Request& request, net::ResponseWriter& writer) {
  const std::string path(request.head.path());
  if (path == "/v1/chat/completions") co_return co_await generate(request, writer, /*chat=*/true);
  if (path == "/v1/completions") co_return co_await generate(request, writer, /*chat=*/false);
  if (path == "/tokenize") co_return co_await tokenize(request, writer);
  if (path == "/v1/kv_transfer/release") co_return co_await release_lease(request, writer);
  if (path.starts_with(kKvPath) && path.ends_with(kRenew)) {
    const bool renewed = site_->leases.renew(path.substr(kKvPath.size(), path.size() - kKvPath.size() - kRenew.size()));
    if (renewed) {
      const std::string body = dump_json(Json{{"ttl_ms", site_->leases.ttl().count()}});
      net::Headers fields = typed("application/json");
      co_await writer.send(200, std::move(fields), body);
      co_return;
    }
  }
  const ApiFailure missing = no_page(path);
  co_await fail(writer, missing);
}

net::Task<void> LiveWorker::tokenize(net::Request& request, net::ResponseWriter& writer) {
  const Result<std::vector<uint32_t>> tokens = parse_tokenize(request.body);
  if (!tokens) co_return co_await fail(writer, api_failure(tokens.error()));
  const std::string body =
      dump_json(Json{{"count", tokens->size()}, {"max_model_len", site_->options.context_tokens}, {"tokens", *tokens}});
  net::Headers fields = typed("application/json");
  co_await writer.send(200, std::move(fields), body);
}

net::Task<void> LiveWorker::release_lease(net::Request& request, net::ResponseWriter& writer) {
  const Json root = parse_json(request.body);
  const auto lease = root.is_object() ? root.find("lease") : root.end();
  if (!root.is_object() || lease == root.end() || !lease->is_string()) {
    const ApiFailure missing = api_failure(invalid("'lease' is required: the id of a lease", "lease"));
    co_return co_await fail(writer, missing);
  }
  site_->leases.release(lease->get<std::string>());
  net::Headers fields = typed("application/json");
  co_await writer.send(200, std::move(fields), "{}");
}

std::string LiveWorker::models_page() const {
  const LiveOptions& options = site_->options;
  const fleet::Dialect dialect = options.dialect;
  std::string owner = "kindred-simulate";
  if (dialect == fleet::Dialect::kVllm || dialect == fleet::Dialect::kSglang) owner = fleet::to_string(dialect);
  Json entry = {{"id", options.model},
                {"object", "model"},
                {"created", 0},
                {"owned_by", owner},
                {"max_model_len", options.context_tokens}};
  if (dialect == fleet::Dialect::kKindred) {
    const expert::ExpertShape& shape = site_->process->shape();
    entry["kindred"] = {{"v", 1},
                        {"role", to_string(spec().role)},
                        {"fingerprint", options.fingerprint},
                        {"layers", shape.layers},
                        {"experts", shape.experts},
                        {"top_k", shape.top_k},
                        {"paced", "simulated"}};
  }
  return dump_json(Json{{"object", "list"}, {"data", {std::move(entry)}}});
}

std::string LiveWorker::server_info_page() const {
  const Role role = spec().role;
  return dump_json(Json{{"version", site_->options.version},
                        {"disaggregation_mode", role == Role::kBoth ? "null" : to_string(role)},
                        {"disaggregation_bootstrap_port", port_}});
}

std::string LiveWorker::metrics_page() const {
  const LoopTotals& totals = loop_->totals();
  const bool sglang = site_->options.dialect == fleet::Dialect::kSglang;
  std::string out;
  const auto line = [&](std::string_view name, std::string_view kind, double value) {
    out += fmt::format("# TYPE {} {}\n{}{{model_name={}}} {}\n", name, kind, name, json_string(site_->options.model),
                       value);
  };
  double running = 0, waiting = 0, usage = 0, preemptions = 0, prompts = 0, cached = 0;
  for (const sim::Engine& engine : loop_->engines()) {
    running += static_cast<double>(engine.running());
    waiting += static_cast<double>(engine.waiting());
    usage = std::max(usage, static_cast<double>(engine.pool().used()) / engine.pool().capacity());
    preemptions += static_cast<double>(engine.preemptions());
    prompts += static_cast<double>(engine.prompt_tokens());
    cached += static_cast<double>(engine.cached_tokens());
  }
  line(sglang ? "sglang:num_running_reqs" : "vllm:num_requests_running", "gauge", running);
  line(sglang ? "sglang:num_queue_reqs" : "vllm:num_requests_waiting", "gauge", waiting);
  line(sglang ? "sglang:token_usage" : "vllm:kv_cache_usage_perc", "gauge", usage);
  if (!sglang) {
    line("vllm:prompt_tokens_total", "counter", static_cast<double>(totals.prompt_tokens));
    line("vllm:generation_tokens_total", "counter", static_cast<double>(totals.generated_tokens));
    line("vllm:num_preemptions_total", "counter", preemptions);
    line("vllm:prefix_cache_queries_total", "counter", prompts);
    line("vllm:prefix_cache_hits_total", "counter", cached);
  }
  line("kindred_simulated_steps_total", "counter", static_cast<double>(totals.steps));
  line("kindred_leases", "gauge", static_cast<double>(site_->leases.count(number_)));
  return out;
}

}  // namespace kindred::live
