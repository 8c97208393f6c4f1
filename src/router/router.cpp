#include "router/router.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <boost/asio/co_spawn.hpp>
#include <functional>
#include <span>

#include "router/admin.h"
#include "router/decode_room.h"
#include "router/door.h"
#include "router/exchange.h"
#include "router/experiment.h"
#include "router/headers.h"
#include "router/health.h"
#include "router/lease.h"
#include "router/loop_watch.h"
#include "router/membership.h"
#include "router/models.h"
#include "router/otlp.h"
#include "router/pd_flow.h"
#include "router/plain_flow.h"
#include "router/prefixes.h"
#include "router/prober.h"
#include "router/refitter.h"
#include "router/reload.h"
#include "router/sglang_flow.h"
#include "router/visit.h"
#include "router/vllm_flow.h"
#include "router/workers.h"

namespace kindred::router {
namespace {

using namespace std::chrono_literals;

constexpr std::array<std::string_view, 2> kGeneratePaths = {"/v1/chat/completions", "/v1/completions"};
// Other ways to ask for a completion, which some engines know.
constexpr std::array<std::string_view, 2> kConversePaths = {"/v1/messages", "/v1/responses"};
// Paths of other jobs, which one worker does by itself.
constexpr std::array<std::string_view, 6> kPlainPaths = {
    "/v1/embeddings", "/v1/messages/count_tokens", "/v1/rerank", "/v1/score", "/tokenize", "/detokenize"};

// What operators ask; answered on the admin listener where there is one.
constexpr std::array<std::string_view, 6> kAdminPaths = {"/metrics",       "/status", "/workers",
                                                         "/workers/drain", "/config", "/experiment"};

// Asked by probes, which have no key.
constexpr std::array<std::string_view, 2> kOpenPaths = {"/health", "/ready"};

constexpr std::chrono::milliseconds kAdminGrace{100};
constexpr std::chrono::milliseconds kCertificatePoll{1'000};
constexpr std::chrono::milliseconds kFlush{1'000};
constexpr std::chrono::milliseconds kOthersGrace{2'000};

bool contains(std::span<const std::string_view> paths, std::string_view path) {
  return std::find(paths.begin(), paths.end(), path) != paths.end();
}

ApiError no_such_path(const Exchange& exchange) {
  if (exchange.request.head.path().starts_with("/v1/responses/")) {
    return api_error(Error{ErrorCode::kNotFound,
                           "a response is kept by the worker that made it, if at all, and cannot "
                           "be asked for through the router"});
  }
  return api_error(Error{ErrorCode::kNotFound, fmt::format("no such path: {}", exchange.request.head.path())});
}

// A coroutine's frame has room for all that its body may ever hold, for as long as a stream lasts. So what follows
// are plain functions that hand on to the one coroutine that is needed.

template <class Flow>
net::Task<void> run_flow(CorePtr core, Exchange& exchange) {
  Flow flow(std::move(core), exchange);
  co_await flow.run();
}

net::Task<void> run_whole_on_decode(CorePtr core, Exchange& exchange) {
  VllmFlow flow(std::move(core), exchange);
  co_await flow.run_whole();
}

net::Task<void> dispatch(CorePtr core, Exchange& exchange) {
  const fleet::Serving serving = core->fleet.serving(exchange.model);
  const auto paired = [&](fleet::Dialect dialect) { return serving.paired_by.at(static_cast<size_t>(dialect)); };
  if (serving.paired) {
    // A prompt is only run while the decode pool has room for what follows it.
    if (std::optional<ApiError> full = reserve_decode_room(*core, exchange)) return exchange.fail(*std::move(full));
  }
  if (paired(fleet::Dialect::kKindred)) return run_flow<PdFlow>(std::move(core), exchange);
  if (paired(fleet::Dialect::kVllm)) return run_flow<VllmFlow>(std::move(core), exchange);
  if (paired(fleet::Dialect::kSglang)) return run_flow<SglangFlow>(std::move(core), exchange);
  if (serving.plain_up > 0) return run_flow<PlainFlow>(std::move(core), exchange);
  return exchange.fail(no_worker(unserved_reason(*core, exchange.model)));
}

// vLLM's pairs split a message like a completion. A response they cannot split: then one of their decode workers, which
// is a whole engine, does all of it. Those of other pairs are none, or lack the endpoint.
net::Task<void> dispatch_conversation(CorePtr core, Exchange& exchange) {
  const std::string_view path = exchange.request.head.path();
  const fleet::Serving serving = core->fleet.serving(exchange.model);
  const bool vllm = serving.paired_by.at(static_cast<size_t>(fleet::Dialect::kVllm));
  const bool split = vllm && exchange.form() == ApiForm::kMessages && !forces_tool_call(exchange.request.body);
  if (!split && serving.plain_up > 0) return run_flow<PlainFlow>(std::move(core), exchange);
  if (vllm) {
    if (std::optional<ApiError> full = reserve_decode_room(*core, exchange)) return exchange.fail(*std::move(full));
    return split ? run_flow<VllmFlow>(std::move(core), exchange) : run_whole_on_decode(std::move(core), exchange);
  }
  if (!serving.paired) return exchange.fail(no_worker(unserved_reason(*core, exchange.model)));
  return exchange.fail(endpoint_not_served(path, exchange.model,
                                           "it takes one that does the whole request, or prefill and decode on vLLM"));
}

net::Task<void> dispatch_any(CorePtr core, Exchange& exchange) {
  return exchange.completes() ? dispatch(std::move(core), exchange) : dispatch_conversation(std::move(core), exchange);
}

net::Task<void> look_up_and_dispatch(CorePtr core, Exchange& exchange) {
  exchange.prefix = co_await core->prefixes->look_up(core, exchange);
  co_await dispatch_any(core, exchange);
}

net::Task<void> serve_plain(CorePtr core, Exchange& exchange) {
  // Tokenising is the same on every worker of a model; prefill workers know how.
  const bool whole = core->fleet.serving(exchange.model).plain_up > 0;
  const std::string_view path = exchange.request.head.path();
  const bool tokens = path.ends_with("tokenize") || path.ends_with("count_tokens");
  PlainFlow flow(core, exchange, !whole && tokens ? Role::kPrefill : Role::kBoth);
  co_await flow.run();
}

// What the request asks for, into `exchange`; or what is wrong with it.
std::optional<ApiError> read_request(Core& core, Exchange& exchange, bool plain) {
  const net::RequestHead& head = exchange.request.head;
  const std::string_view path = head.path();
  if (plain && !contains(kPlainPaths, path)) return no_such_path(exchange);
  if (head.method != "POST") {
    ApiError error = api_error(invalid(fmt::format("{} answers POST", path)));
    error.status = 405;
    error.allow = "POST";
    return error;
  }
  const std::string& body = exchange.request.body;
  Result<RequestScan> scan = RequestScanner::of(exchange.loop.executor).scan(body, body.capacity());
  if (!scan) return api_error(scan.error());
  exchange.scan = *std::move(scan);
  if (names_events(exchange.form()) && !exchange.scan.preamble.empty()) {
    exchange.joined_prompt = fmt::format("{}{}", exchange.scan.preamble, exchange.scan.prompt);
  }
  Result<std::string> label = domain_label(head.headers);
  if (!label) return api_error(label.error());
  exchange.label = *std::move(label);
  return name_model(core, exchange);
}

net::Task<void> serve(CorePtr core, Exchange& exchange) {
  const std::string_view path = exchange.request.head.path();
  const bool plain = !contains(kGeneratePaths, path) && !contains(kConversePaths, path);
  if (std::optional<ApiError> refused = read_request(*core, exchange, plain)) {
    return exchange.fail(*std::move(refused));
  }
  if (plain) return serve_plain(std::move(core), exchange);
  if (core->prefixes) return look_up_and_dispatch(std::move(core), exchange);
  return dispatch_any(std::move(core), exchange);
}

// Which listener a request came by.
enum class Side { kPublic, kAdmin, kBoth };

// Shows or changes the router itself.
net::Task<void> serve_admin(CorePtr core, Exchange& exchange) {
  bool answered = co_await answer_open(*core, exchange);
  if (!answered) answered = co_await answer_admin(*core, exchange);
  if (!answered) answered = co_await answer_workers(core, exchange);
  if (!answered) answered = co_await answer_config(core, exchange);
  if (answered) co_return;
  ApiError error = no_such_path(exchange);
  co_await exchange.fail(std::move(error));
}

// A batch request ends when its place is needed: it is then as if its client had left, but for being told.
net::Task<void> serve_preemptibly(CorePtr core, Exchange& exchange, const Permit& permit) {
  net::CancelSource either;
  const net::CancelToken client = std::exchange(exchange.request.cancel, either.token());
  const auto gone = client.on_cancel([&] { either.cancel(); });
  const auto needed = permit.preempted().on_cancel([&] { either.cancel(); });
  co_await serve(core, exchange);
  exchange.request.cancel = client;
  if (exchange.outcome != Outcome::kCancelled || client.cancelled()) co_return;
  ApiError error = api_error({ErrorCode::kUnavailable, "an interactive request took the place of this batch request"});
  error.code = "preempted";
  error.retry_after_s = 1;
  error.shed = true;
  co_await exchange.fail(std::move(error));
}

bool is_for_workers(const net::RequestHead& head) {
  const std::string_view path = head.path();
  return head.method == "POST" &&
         (contains(kGeneratePaths, path) || contains(kConversePaths, path) || contains(kPlainPaths, path));
}

// No coroutine of its own, like handle(): each request would pay for it.
net::Entrance at_the_door(CorePtr core, Loop& loop, net::Request& request, net::ResponseWriter& writer) {
  if (!is_for_workers(request.head)) return {};
  return admit(std::move(core), loop, request, writer);
}

net::Task<void> handle_admitted(CorePtr core, Admitted& admitted) {
  Exchange& exchange = admitted.exchange;
  exchange.notes.body_bytes = exchange.request.body.size();
  if (core->experiment) exchange.notes.watched = true;
  std::optional<ApiError> refused = admitted.visit.charge();
  if (refused) co_await exchange.fail(*std::move(refused));
  else if (admitted.lane == Lane::kBatch) co_await serve_preemptibly(core, exchange, *admitted.permit);
  else co_await serve(core, exchange);
  if (core->experiment) core->experiment->finished(exchange);
  core->metrics.request_done(exchange.outcome, exchange.status);
}

net::Task<void> handle_other(CorePtr core, Loop& loop, Side side, net::Request& request, net::ResponseWriter& writer) {
  Exchange exchange(loop, core->settings(), request, writer, request_id_of(*core, request.head), core->clock.now());
  exchange.notes.body_bytes = request.body.size();
  Visit visit(*core, exchange);
  std::optional<ApiError> refused;
  if (side == Side::kAdmin || (side == Side::kBoth && contains(kAdminPaths, request.head.path()))) {
    if (!contains(kOpenPaths, request.head.path())) refused = visit.admit_operator(side == Side::kAdmin);
    if (refused) co_await exchange.fail(*std::move(refused));
    else co_await serve_admin(core, exchange);
    co_return;
  }
  if (!contains(kOpenPaths, request.head.path())) refused = visit.admit_caller();
  if (refused) {
    co_await exchange.fail(*std::move(refused));
    core->metrics.request_done(exchange.outcome, exchange.status);
    co_return;
  }
  const bool answered = co_await answer_open(*core, exchange);
  if (answered) co_return;
  co_await serve(core, exchange);  // which says what is wrong with its path or method
  core->metrics.request_done(exchange.outcome, exchange.status);
}

net::Task<void> handle(CorePtr core, Loop& loop, Side side, net::Request& request, net::ResponseWriter& writer) {
  if (!request.permit) return handle_other(std::move(core), loop, side, request, writer);
  return handle_admitted(std::move(core), *static_cast<Admitted*>(request.permit.get()));
}

// Takes a certificate that was replaced on disk.
net::Task<void> watch_certificate(CorePtr core) {
  net::asio::steady_timer pause(core->executor);
  const auto closing = core->closing.token().on_cancel([&pause] { pause.cancel(); });
  while (!core->closing.cancelled()) {
    pause.expires_after(kCertificatePoll);
    co_await pause.async_wait(net::kNoThrow);
    const Result<bool> taken = core->edge->tls()->reload_if_changed();
    if (!taken) core->log.warn("the certificate stays as it was: {}", taken.error().message);
    else if (*taken) core->log.info("a new certificate is in force");
  }
}

// Polled, since what is waited for are counters and this happens once.
net::Task<void> wait_until(CorePtr core, std::function<bool()> holds, std::chrono::milliseconds deadline_ms) {
  const auto until = std::chrono::steady_clock::now() + deadline_ms;
  net::asio::steady_timer timer(core->executor);
  while (!holds() && std::chrono::steady_clock::now() < until) {
    timer.expires_after(5ms);
    co_await timer.async_wait(net::kNoThrow);
  }
}

net::Task<void> wait_for_background(CorePtr core, bool standing_too, std::chrono::milliseconds deadline_ms) {
  const auto ended = [core, standing_too] { return core->background() <= (standing_too ? 0 : core->standing()); };
  co_await wait_until(core, ended, deadline_ms);
}

// Lets all servers finish at the same time, each on its own thread.
net::Task<void> drain_servers(CorePtr core, std::span<const std::unique_ptr<net::HttpServer>> servers,
                              std::chrono::milliseconds deadline_ms) {
  // First of all: it takes no more connections for the others.
  servers.front()->stop();
  const auto left = std::make_shared<std::atomic<size_t>>(servers.size() - 1);
  // In the order of the thread's queue this comes behind the connections that the first one has handed over.
  for (size_t i = 1; i < servers.size(); ++i) {
    net::asio::co_spawn(core->loops[i].executor, servers[i]->drain(deadline_ms),
                        [left](const std::exception_ptr&) { --*left; });
  }
  co_await servers.front()->drain(deadline_ms);
  const auto ended = [left] { return *left == 0; };
  co_await wait_until(core, ended, deadline_ms + kOthersGrace);
}

net::Task<void> close_loop(Loop& loop) {
  loop.closing.cancel();
  loop.client.shut_down();
  co_return;
}

}  // namespace

Router::Router(CorePtr core) : core_(std::move(core)) {}

Router::~Router() {
  for (Loop& loop : core_->loops) loop.closing.cancel();
  if (core_->refitter) core_->refitter->stop();
}

Result<std::unique_ptr<Router>> Router::make(std::span<const net::asio::any_io_executor> executors,
                                             RouterOptions options, const Clock& clock) {
  Result<CorePtr> core = Core::make(executors, std::move(options), clock);
  if (!core) return std::move(core).error();
  std::unique_ptr<Router> router(new Router(*core));  // the constructor is private
  const SettingsPtr settings = (*core)->settings();
  const EdgeOptions& edge = settings->options.edge;
  const auto serve_side = [&](Loop& loop, Side side) {
    net::ServerOptions server = edge.server;
    server.body_bytes = settings->options.body_bytes;
    server.tls = (*core)->edge->tls();
    net::Doorkeeper doorkeeper;
    if (side != Side::kAdmin) {
      doorkeeper = [core = *core, &loop](net::Request& request, net::ResponseWriter& writer) {
        return at_the_door(core, loop, request, writer);
      };
    }
    return std::make_unique<net::HttpServer>(
        loop.executor, server,
        [core = *core, &loop, side](net::Request& request, net::ResponseWriter& writer) {
          return handle(core, loop, side, request, writer);
        },
        std::move(doorkeeper));
  };
  std::vector<net::HttpServer*> others;
  for (Loop& loop : (*core)->loops) {
    router->servers_.push_back(serve_side(loop, edge.admin_port ? Side::kPublic : Side::kBoth));
    if (router->servers_.size() > 1) others.push_back(router->servers_.back().get());
  }
  router->servers_.front()->share_with(others);
  if (edge.admin_port) router->admin_server_ = serve_side((*core)->loops.front(), Side::kAdmin);
  return router;
}

Result<uint16_t> Router::listen() {
  const SettingsPtr settings = core_->settings();
  const EdgeOptions& edge = settings->options.edge;
  if (admin_server_) {
    Result<uint16_t> admin = admin_server_->listen(edge.admin_host, *edge.admin_port);
    if (!admin) return admin;
    admin_port_ = *admin;
  }
  Result<uint16_t> port = servers_.front()->listen(settings->options.host, settings->options.port);
  if (port) {
    start_probing(core_);
    start_refitting(core_);
    start_renewing(core_);
    start_watching(core_);
    start_loop_watch(core_);
    if (core_->experiment) Core::spawn(core_, Experiment::watch(core_), /*standing=*/true);
    if (core_->edge->tls()) Core::spawn(core_, watch_certificate(core_), /*standing=*/true);
    if (core_->edge->otlp()) Core::spawn(core_, export_spans(core_), /*standing=*/true);
  }
  return port;
}

void Router::set_config_source(std::unique_ptr<ConfigSource> source) { core_->config = std::move(source); }

std::vector<Error> Router::reload() {
  std::vector<Error> problems = router::reload(core_, std::nullopt);
  if (Status read = core_->edge->reload(); !read) problems.push_back(std::move(read).error());
  return problems;
}

net::Task<void> Router::drain(std::chrono::milliseconds deadline_ms) {
  core_->draining = true;
  co_await drain_servers(core_, servers_, deadline_ms);
  // Last, so that operators can watch the rest.
  if (admin_server_) co_await admin_server_->drain(kAdminGrace);
  // What is left are the tasks that never end by themselves, and the last releases of leases.
  co_await wait_for_background(core_, /*standing_too=*/false, 1s);
  if (core_->edge->otlp()) co_await flush_spans(core_, kFlush);
  for (Loop& loop : core_->loops) co_await run_on(loop, close_loop(loop));
  if (core_->refitter) core_->refitter->stop();
  core_->leases->stop();
  for (const Core::Worker& worker : core_->workers) worker.pause->cancel();
  co_await wait_for_background(core_, /*standing_too=*/true, 1s);
}

}  // namespace kindred::router
