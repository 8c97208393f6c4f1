// `kindred router`: an OpenAI-compatible endpoint over a fleet of workers; and `kindred picker`, the same with a door
// for gateways.
#include "router/router.h"

#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/signal_set.hpp>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/config.h"
#include "cli/commands.h"
#include "cli/router_edge.h"
#include "cli/router_engines.h"
#include "cli/router_experiment.h"
#include "cli/router_history.h"
#include "cli/router_kv.h"
#include "cli/router_limits.h"
#include "cli/router_picker.h"
#include "cli/router_requests.h"
#include "cli/terminal.h"
#include "net/io_threads.h"
#ifdef KINDRED_HAVE_PICKER
#include "picker/picker.h"
#endif

namespace kindred::cli {
namespace {

namespace asio = net::asio;
using std::chrono::milliseconds;

constexpr int64_t kMostThreads = 256;

struct RouterArguments {
  std::string host = "127.0.0.1";
  int64_t port = 8000;
  int64_t threads = 1;
  std::vector<std::string> prefill, decode, worker;
  std::string decode_policy = "locality-band", prefill_policy = "prefix-hash";
  double tau = 0.1, load_cap = 1.25;
  std::string tie_break = "rotate";
  std::vector<std::string> dialects, model_aliases;
  std::string load = "requests";
  int64_t load_interval_ms = 1'000, load_max_age_ms = 5'000;
  std::string cohorts;
  bool refit = false, manage_workers = false;
  int64_t refit_interval_ms = 5'000, refit_window_ms = 5'000, refit_grace_ms = 30'000, refit_min_requests = 64;
  int64_t seed = 1;
  bool shuffle_signatures = false;
  int64_t prefix_bytes = 1024;
  int64_t health_interval_ms = 1'000, failures_until_out = 3, breaker_open_ms = 1'000, breaker_probes = 2,
          slow_start_ms = 5'000;
  int64_t body_bytes = 64LL << 20;
  int64_t decisions = 1024;
  int64_t drain_ms = 30'000;
  RequestArguments requests;
  std::string workers_file, kubernetes_api, kubernetes_token_file, kubernetes_ca_file;
  std::vector<std::string> kubernetes_services;
  int64_t workers_file_interval_ms = 1'000, dns_interval_ms = 5'000;
  EdgeArguments edge;
  EngineArguments engines;
  KvArguments kv;
  HistoryArguments history;
  ExperimentArguments experiment;
  PickerArguments picker;
  bool as_picker = false;  // whether these are options, too
  bool check_config = false;
};

std::vector<std::string> names(std::span<const std::string_view> of) { return {of.begin(), of.end()}; }

ConfigSchema schema_of(RouterArguments& o) {
  ConfigSchema schema(
      o.as_picker ? "picker [--config fleet.yaml] [OPTIONS]" : "router [--config fleet.yaml] [OPTIONS]",
      o.as_picker
          ? "Chooses workers for a gateway (Envoy's ext_proc, Gateway API's endpoint picker protocol) as `kindred "
            "router` would, whose options it has; on --port it is a router itself. See docs/picker.md."
          : "Serves OpenAI's API over a fleet of workers, and chooses where each request is decoded by the "
            "experts its prompt uses.");
  if (o.as_picker) o.picker.add_to(schema);
  schema.text("host", &o.host, "address to listen on");
  schema.integer("port", &o.port, 0, 65535, "port to listen on; 0 takes a free one");
  schema.integer("threads", &o.threads, 1, kMostThreads, "threads that serve requests; one per core it may use");
  schema.list("prefill", &o.prefill, "URL of a worker that runs prompts");
  schema.list("decode", &o.decode, "URL of a worker that generates; cohort i belongs to the i-th");
  schema.list("worker", &o.worker, "URL of an OpenAI-compatible server that does both");
  schema.choice("decode_policy", &o.decode_policy, names(policy::decode_policy_names()), "how to choose it");
  schema.choice("prefill_policy", &o.prefill_policy, names(policy::prefill_policy_names()), "how to choose it");
  schema.text("cohorts", &o.cohorts, "cohort file of `kindred fit`, for locality-band");
  schema.flag("refit", &o.refit, "fit the cohorts anew from the traffic of the last seconds");
  schema.integer("refit_interval_ms", &o.refit_interval_ms, 10, kDayMs, "between two refits");
  schema.integer("refit_window_ms", &o.refit_window_ms, 10, kDayMs, "age of the oldest request that a refit sees");
  schema.integer("refit_min_requests", &o.refit_min_requests, 1, 2048, "requests a refit needs at least");
  schema.integer("refit_grace_ms", &o.refit_grace_ms, 0, kDayMs,
                 "how long a worker that is down or removed keeps its cohort");
  schema.flag("manage_workers", &o.manage_workers, "POST and DELETE /workers change the fleet; see docs/router.md");
  schema.text("workers_file", &o.workers_file, "YAML or JSON list of workers that is watched; see docs/router.md");
  schema.integer("workers_file_interval_ms", &o.workers_file_interval_ms, 10, kDayMs, "between two looks at it");
  schema.list("kubernetes_service", &o.kubernetes_services,
              "NAMESPACE/NAME[:PORT][=prefill|decode|both]: workers are the endpoints of this Service");
  schema.text("kubernetes_api", &o.kubernetes_api, "URL of the API server; empty: that of the pod the router runs in");
  schema.text("kubernetes_token_file", &o.kubernetes_token_file, "token for it; empty: the pod's, or none");
  schema.text("kubernetes_ca_file", &o.kubernetes_ca_file, "whose certificate it has; empty: the pod's");
  schema.integer("dns_interval_ms", &o.dns_interval_ms, 10, kDayMs,
                 "between two looks at the addresses behind workers' names");
  schema.real("tau", &o.tau, 0, 2, "locality-band: similarity a candidate may lose to the best");
  schema.real("load_cap", &o.load_cap, 0, 1e9, "locality-band, domain: multiple of the mean load, at least 1; 0: none");
  schema.choice("tie_break", &o.tie_break, {"rotate", "lowest-index", "random"}, "who wins among equals");
  schema.integer("seed", &o.seed, 0, INT64_MAX, "of random choices");
  schema.flag("shuffle_signatures", &o.shuffle_signatures, "ablation: decide with another request's expert counts");
  schema.integer("prefix_bytes", &o.prefix_bytes, 1, 1 << 30, "prefix-hash: bytes of the prompt that are hashed");
  schema.list("dialect", &o.dialects,
              "URL=DIALECT of a worker, where it is not to be found out: kindred, vllm, sglang, "
              "llama-server or openai");
  schema.list("model_alias", &o.model_aliases, "ALIAS=MODEL: another name by which clients may ask for a model");
  schema.choice("load", &o.load, {"requests", "tokens", "polled", "pressure"},
                "what policies balance: the router's own ledger, or what workers or their engines say of themselves");
  schema.integer("load_interval_ms", &o.load_interval_ms, 0, kDayMs, "between two polls of a worker's load; 0: none");
  schema.integer("load_max_age_ms", &o.load_max_age_ms, 1, kDayMs,
                 "older polls count as unknown; the router's own ledger is read then");
  schema.integer("health_interval_ms", &o.health_interval_ms, 10, kDayMs, "between two health checks of a worker");
  schema.integer("failures_until_out", &o.failures_until_out, 1, 1000,
                 "checks, or requests, that fail in a row before a worker is out");
  schema.integer("breaker_open_ms", &o.breaker_open_ms, 1, kDayMs,
                 "until a worker whose requests failed is tried again");
  schema.integer("breaker_probes", &o.breaker_probes, 1, 1000,
                 "requests at once to a worker whose requests had failed, until one succeeds");
  schema.integer("slow_start_ms", &o.slow_start_ms, 0, kDayMs,
                 "until a worker that was out has a full share again; 0: at once");
  schema.integer("body_bytes", &o.body_bytes, 1024, INT64_MAX, "longest request body");
  schema.integer("decisions", &o.decisions, 0, 1'000'000, "last decisions kept for /status");
  schema.integer("drain_ms", &o.drain_ms, 0, kDayMs, "time for running requests to end after SIGTERM");
  o.requests.add_to(schema);
  o.edge.add_to(schema);
  o.engines.add_to(schema);
  o.kv.add_to(schema);
  o.history.add_to(schema);
  o.experiment.add_to(schema);
  schema.flag("check_config", &o.check_config,
              "only say whether it could start with these options; exit status 0 or 2");
  schema.accept_config_file();
  return schema;
}

// What Kubernetes gives each pod to reach its API server by.
void use_pod(router::RouterOptions& out) {
  const char* host = std::getenv("KUBERNETES_SERVICE_HOST");
  const char* port = std::getenv("KUBERNETES_SERVICE_PORT");
  if (host == nullptr || port == nullptr) return;
  const bool v6 = std::string_view(host).find(':') != std::string_view::npos;
  out.kubernetes_api = fmt::format("https://{}{}{}:{}", v6 ? "[" : "", host, v6 ? "]" : "", port);
  const std::string account = "/var/run/secrets/kubernetes.io/serviceaccount/";
  if (out.kubernetes_token_file.empty()) out.kubernetes_token_file = account + "token";
  if (out.kubernetes_ca_file.empty()) out.kubernetes_ca_file = account + "ca.crt";
}

Result<router::RouterOptions> router_options(RouterArguments& o) {
  router::RouterOptions out;
  out.host = o.host;
  out.port = static_cast<uint16_t>(o.port);
  out.threads = static_cast<size_t>(o.threads);
  out.prefill = o.prefill;
  out.decode = o.decode;
  out.worker = o.worker;
  out.prefill_policy.name = o.prefill_policy;
  out.prefill_policy.prefix_bytes = static_cast<uint32_t>(o.prefix_bytes);
  out.prefill_policy.tie_break = o.tie_break;
  out.prefill_policy.seed = static_cast<uint64_t>(o.seed);
  out.decode_policy.name = o.decode_policy;
  out.decode_policy.tau = o.tau;
  out.decode_policy.load_cap = o.load_cap;
  out.decode_policy.tie_break = o.tie_break;
  out.decode_policy.seed = static_cast<uint64_t>(o.seed);
  out.decode_policy.shuffle_signatures = o.shuffle_signatures;
  out.cohorts = o.cohorts;
  out.refit.on = o.refit;
  out.refit.interval_ms = milliseconds(o.refit_interval_ms);
  out.refit.window_ms = milliseconds(o.refit_window_ms);
  out.refit.grace_ms = milliseconds(o.refit_grace_ms);
  out.refit.min_requests = static_cast<uint32_t>(o.refit_min_requests);
  out.refit.seed = static_cast<uint64_t>(o.seed);
  out.manage_workers = o.manage_workers;
  out.dialects = o.dialects;
  out.model_aliases = o.model_aliases;
  out.load = fleet::parse_load_source(o.load).value_or(fleet::LoadSource::kRequests);
  out.load_interval_ms = milliseconds(o.load_interval_ms);
  out.load_max_age_ms = milliseconds(o.load_max_age_ms);
  out.health_interval_ms = milliseconds(o.health_interval_ms);
  out.failures_until_out = static_cast<uint32_t>(o.failures_until_out);
  out.breaker_open_ms = milliseconds(o.breaker_open_ms);
  out.breaker_probes = static_cast<uint32_t>(o.breaker_probes);
  out.slow_start_ms = milliseconds(o.slow_start_ms);
  out.body_bytes = static_cast<size_t>(o.body_bytes);
  out.decisions = static_cast<size_t>(o.decisions);
  o.requests.apply(out);
  out.workers_file = o.workers_file;
  out.workers_file_interval_ms = milliseconds(o.workers_file_interval_ms);
  out.kubernetes_services = o.kubernetes_services;
  out.kubernetes_api = o.kubernetes_api;
  out.kubernetes_token_file = o.kubernetes_token_file;
  out.kubernetes_ca_file = o.kubernetes_ca_file;
  if (!o.kubernetes_services.empty() && o.kubernetes_api.empty()) use_pod(out);
  out.dns_interval_ms = milliseconds(o.dns_interval_ms);
  o.engines.apply(out);
  o.kv.apply(out);
  o.history.apply(out);
  if (Status applied = o.experiment.apply(out); !applied) return std::move(applied).error();
  if (Status applied = o.edge.apply(out); !applied) return std::move(applied).error();
  return out;
}

// File and flags, and what PUT /config has changed since.
class LiveConfig final : public router::ConfigSource {
 public:
  LiveConfig(RouterArguments running, Args args) : running_(std::move(running)), args_(args.begin(), args.end()) {}

  std::vector<Error> read(std::optional<std::string_view> yaml, router::RouterOptions& out) override {
    std::vector<Error> problems;
    read_ = yaml ? running_ : fresh();
    ConfigSchema schema = schema_of(read_);
    if (yaml) {
      problems = schema.check_yaml(*yaml, "config");
    } else {
      problems = check_file();
      if (!problems.empty()) return problems;
      if (Status parsed = schema.parse_flags(args_); !parsed) problems.push_back(std::move(parsed).error());
    }
    if (read_.picker != running_.picker) {
      problems.push_back(invalid("picker_*: these cannot change while the picker runs; restart it", "picker_port"));
    }
    if (!problems.empty()) return problems;
    Result<router::RouterOptions> made = router_options(read_);
    if (made) out = *std::move(made);
    else problems.push_back(std::move(made).error());
    return problems;
  }
  void accept() override { running_ = read_; }
  // Secrets are in files and in the environment, never in options.
  std::string running() const override {
    RouterArguments copy = running_;
    return schema_of(copy).to_json();
  }

 private:
  // All that is wrong with the file, where parse_flags() would tell the first.
  std::vector<Error> check_file() {
    const std::string path = ConfigSchema::config_path(args_);
    if (path.empty()) return {};
    Result<std::string> yaml = read_file(path);
    if (!yaml) return {std::move(yaml).error()};
    RouterArguments unused = fresh();
    return schema_of(unused).check_yaml(*yaml, path);
  }

  RouterArguments fresh() const {
    RouterArguments out;
    out.as_picker = running_.as_picker;
    return out;
  }

  RouterArguments running_, read_;
  std::vector<const char*> args_;
};

// A client's connection takes a descriptor, and its request another, to a worker. The soft limit is often 1024, for
// the sake of programs that use select(); the hard one is what the system means.
void make_room_for_connections(int64_t connections) {
  constexpr rlim_t kOthers = 256;  // listeners, workers' health, logs, feeds
  const rlim_t wanted = 2 * static_cast<rlim_t>(connections) + kOthers;
  rlimit files{};
  if (::getrlimit(RLIMIT_NOFILE, &files) != 0 || files.rlim_cur >= wanted) return;
  files.rlim_cur = std::min(files.rlim_max, wanted);
  ::setrlimit(RLIMIT_NOFILE, &files);
  ::getrlimit(RLIMIT_NOFILE, &files);
  if (files.rlim_cur >= wanted) return;
  fmt::print(stderr,
             "kindred router: {} open files are allowed (ulimit -Hn); {} connections with a request each need up to "
             "{}: raise the limit, or lower --connections\n",
             files.rlim_cur, connections, wanted);
}

// At each SIGHUP; the router says what came of it.
void reload_on_hangup(asio::signal_set& hangup, router::Router& router) {
  hangup.async_wait([&](boost::system::error_code error, int) {
    if (error) return;
    router.reload();
    reload_on_hangup(hangup, router);
  });
}

// Lets a gateway's streams end; blocks until they have, or the time is over.
using DrainFirst = std::function<void(milliseconds)>;

// Serves until SIGINT or SIGTERM, then lets requests finish. A second signal ends at once.
int serve(net::IoThreads& threads, router::Router& router, milliseconds drain_ms, const DrainFirst& first) {
  asio::io_context& context = threads.first();
  const auto drain = [&] {
    asio::co_spawn(context, router.drain(drain_ms), [&](const std::exception_ptr&) { threads.stop(); });
  };
  std::thread first_drain;  // the streams need the loops to end
  asio::signal_set signals(context, SIGINT, SIGTERM);
  signals.async_wait([&](boost::system::error_code error, int) {
    if (error) return;
    fmt::print(stderr, "kindred router: no new requests; {} in flight may finish within {} s\n",
               router.core().requests_in_flight(), drain_ms.count() / 1000);
    signals.async_wait([&](boost::system::error_code again, int) {
      if (again) return;
      if (first) std::_Exit(0);  // gRPC's shutdown, once begun, cannot be hurried
      threads.stop();
    });
    router.core().draining = true;
    if (!first) return drain();
    first_drain = std::thread([&] {
      first(drain_ms);
      asio::post(context, drain);
    });
  });
  asio::signal_set hangup(context, SIGHUP);
  reload_on_hangup(hangup, router);
  threads.run();
  if (first_drain.joinable()) first_drain.join();
  return 0;
}

int serve_router(net::IoThreads& threads, router::Router& router, const RouterArguments& options) {
  fmt::print("kindred router: listening on http://{}:{} ({} prefill, {} decode, {} whole; policy {})\n", options.host,
             options.port, options.prefill.size(), options.decode.size(), options.worker.size(), options.decode_policy);
  if (const auto admin = router.admin_port()) {
    fmt::print("kindred router: admin on http://{}:{}\n", options.edge.admin_host, *admin);
  }
  const milliseconds drain_ms(options.drain_ms);
#ifdef KINDRED_HAVE_PICKER
  if (options.as_picker) {
    picker::PickerOptions wanted;
    wanted.host = options.picker.host;
    wanted.port = static_cast<uint16_t>(options.picker.port);
    wanted.streams = static_cast<size_t>(options.picker.streams);
    wanted.stream_ms = milliseconds(options.picker.stream_ms);
    wanted.tls_cert = options.picker.tls_cert;
    wanted.tls_key = options.picker.tls_key;
    const auto made = picker::Picker::listen(router.shared_core(), wanted);
    if (!made) return fail("picker", made.error(), made.error().code == ErrorCode::kInvalid ? 2 : 1);
    fmt::print("kindred picker: gRPC on {}:{}{}\n", options.picker.host, (*made)->port(),
               wanted.tls_cert.empty() ? "" : " under TLS");
    std::fflush(stdout);
    return serve(threads, router, drain_ms, [&](milliseconds most) { (*made)->drain(most); });
  }
#endif
  std::fflush(stdout);
  return serve(threads, router, drain_ms, {});
}

int run(Args args, bool as_picker) {
  const std::string_view name = as_picker ? "picker" : "router";
  RouterArguments options;
  options.as_picker = as_picker;
  ConfigSchema schema = schema_of(options);
  if (Status parsed = schema.parse_flags(args); !parsed) {
    return fail(name, parsed.error(), 2);
  }
  if (schema.help_requested()) {
    fmt::print("{}", schema.help());
    return 0;
  }
  Result<router::RouterOptions> configured = router_options(options);
  if (!configured) return fail(name, configured.error(), 2);
  make_room_for_connections(options.edge.connections);
  const SystemClock clock;
  net::IoThreads threads(configured->threads);
  auto router = router::Router::make(threads.executors(), *std::move(configured), clock);
  if (!router) {
    fmt::print(stderr, "kindred {}: {}\n", name, router.error().message);
    return router.error().code == ErrorCode::kInvalid ? 2 : 1;
  }
  if (options.check_config) {
    fmt::print("kindred {}: the configuration is good\n", name);
    return 0;
  }
  (*router)->set_config_source(std::make_unique<LiveConfig>(options, args));
  const Result<uint16_t> port = (*router)->listen();
  if (!port) {
    return fail(name, port.error());
  }
  options.port = *port;
  return serve_router(threads, **router, options);
}

}  // namespace

int run_router(Args args) { return run(args, /*as_picker=*/false); }

int run_picker(Args args) {
#ifndef KINDRED_HAVE_PICKER
  const auto asks = [](const char* arg) { return std::string_view(arg) == "--help"; };
  if (std::none_of(args.begin(), args.end(), asks)) {
    fmt::print(stderr,
               "kindred picker: this program was built without gRPC. Install libgrpc++-dev, libprotobuf-dev, "
               "protobuf-compiler and protobuf-compiler-grpc, and build with -DKINDRED_PICKER=ON.\n");
    return 1;
  }
#endif
  return run(args, /*as_picker=*/true);
}

}  // namespace kindred::cli
