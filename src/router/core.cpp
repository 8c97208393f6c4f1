#include "router/core.h"

#include <fmt/format.h>

#include <algorithm>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/post.hpp>
#include <optional>
#include <random>

#include "base/bytes.h"
#include "base/rng.h"
#include "fleet/endpoint_slices.h"
#include "net/tls.h"
#include "policy/locked.h"
#include "policy/shadow.h"
#include "router/edge.h"
#include "router/experiment.h"
#include "router/gate.h"
#include "router/history.h"
#include "router/lease.h"
#include "router/prefixes.h"
#include "router/refitter.h"
#include "router/reload.h"

namespace kindred::router {
namespace {

uint64_t random_seed() {
  std::random_device device;
  return (static_cast<uint64_t>(device()) << 32) ^ device();
}

net::ClientOptions export_options(const RouterOptions& options) {
  net::ClientOptions out;
  out.tls = options.edge.upstream.tls;
  out.connections_per_endpoint = 2;
  return out;
}

net::ClientOptions probe_options(const RouterOptions& options) {
  net::ClientOptions out = options.edge.upstream;
  out.idle_per_endpoint = 1;
  out.connect_timeout_ms = options.health_timeout_ms;
  return out;
}

// What stands in the list of URL=DIALECT for `url`, which is what parse_endpoint() makes of it.
std::optional<fleet::Dialect> configured_dialect(const RouterOptions& options, const std::string& url) {
  for (const std::string& entry : options.dialects) {
    const size_t equals = entry.rfind('=');
    if (equals == std::string::npos) continue;
    const auto endpoint = net::parse_endpoint(entry.substr(0, equals));
    if (endpoint && endpoint->url() == url) return fleet::parse_dialect(std::string_view(entry).substr(equals + 1));
  }
  return std::nullopt;
}

void check_dialects(const RouterOptions& options, std::vector<Error>& problems) {
  for (const std::string& entry : options.dialects) {
    const size_t equals = entry.rfind('=');
    const bool good = equals != std::string::npos && net::parse_endpoint(entry.substr(0, equals)).ok() &&
                      fleet::parse_dialect(std::string_view(entry).substr(equals + 1));
    if (good) continue;
    problems.push_back(
        invalid(fmt::format("dialect: got '{}', accepted: URL=DIALECT with one of {}", entry, fleet::kDialectNames),
                "dialect"));
  }
}

std::deque<Loop> make_loops(std::span<const net::asio::any_io_executor> executors, const net::ClientOptions& upstream) {
  std::deque<Loop> out;
  for (const net::asio::any_io_executor& executor : executors) out.emplace_back(executor, upstream);
  return out;
}

// Workers may come from elsewhere, so that the options need name none.
bool may_grow(const RouterOptions& options) {
  return options.manage_workers || !options.workers_file.empty() || !options.kubernetes_services.empty();
}

void check_kubernetes(const RouterOptions& options, std::vector<Error>& problems) {
  for (const std::string& service : options.kubernetes_services) {
    if (auto parsed = fleet::parse_kubernetes_service(service); !parsed) problems.push_back(std::move(parsed).error());
  }
  if (options.kubernetes_services.empty()) return;
  if (auto api = net::parse_endpoint(options.kubernetes_api); !api) {
    problems.push_back(invalid(fmt::format("kubernetes_api: '{}': {}", options.kubernetes_api, api.error().message),
                               "kubernetes_api"));
  }
  net::TlsClientFiles files;
  files.ca = options.kubernetes_ca_file;
  if (auto tls = net::TlsClient::make(std::move(files)); !tls) {
    problems.push_back(invalid(fmt::format("kubernetes_ca_file: {}", tls.error().message), "kubernetes_ca_file"));
  }
}

}  // namespace

std::string_view to_string(Origin origin) {
  switch (origin) {
    case Origin::kConfig: return "config";
    case Origin::kApi: return "api";
    case Origin::kFile: return "file";
    case Origin::kKubernetes: return "kubernetes";
  }
  return "?";
}

fleet::FleetOptions fleet_options(const RouterOptions& options) {
  fleet::FleetOptions out;
  out.failures_until_out = options.failures_until_out;
  out.load = options.load;
  out.load_max_age_ms = options.load_max_age_ms;
  out.breaker.faults_until_open = options.failures_until_out;
  out.breaker.open_ms = options.breaker_open_ms;
  out.breaker.probes = options.breaker_probes;
  out.breaker.slow_start_ms = options.slow_start_ms;
  out.trace_max_age_ms = options.engines.trace_max_age_ms;
  out.trace_grace_ms = options.engines.trace_grace_ms;
  out.pressure = options.engines.policy.pressure;
  out.dispatch_seed = random_seed();  // two routers must not give one id
  return out;
}

Result<DecodePolicies> make_decode_policies(const policy::DecodePolicyOptions& options) {
  auto decode = policy::make_decode_policy(options);
  if (!decode) return std::move(decode).error();
  policy::DecodePolicyOptions plain = options;
  if ((*decode)->wants_counts()) plain.name = "least-loaded";
  auto whole = policy::make_decode_policy(plain);
  if (!whole) return std::move(whole).error();
  return DecodePolicies(*std::move(decode), *std::move(whole));
}

std::vector<Error> wanted_workers(const RouterOptions& options, std::vector<fleet::WantedWorker>& out) {
  std::vector<Error> problems;
  const auto add = [&](const std::vector<std::string>& urls, Role role, const std::string& option) {
    for (const std::string& url : urls) {
      const Result<net::Endpoint> endpoint = net::parse_endpoint(url);
      if (!endpoint) {
        problems.push_back(invalid(fmt::format("{}: '{}': {}", option, url, endpoint.error().message), option));
        continue;
      }
      fleet::WantedWorker worker{.url = endpoint->url(), .role = role};
      worker.dialect = configured_dialect(options, worker.url);
      const bool known = std::ranges::any_of(out, [&](const auto& other) { return other.url == worker.url; });
      if (known) problems.push_back(invalid(fmt::format("{}: {} is a worker already", option, url), option));
      else out.push_back(std::move(worker));
    }
  };
  add(options.prefill, Role::kPrefill, "prefill");
  add(options.decode, Role::kDecode, "decode");
  add(options.worker, Role::kBoth, "worker");
  check_dialects(options, problems);
  check_kubernetes(options, problems);
  if (may_grow(options)) return problems;  // they may come later
  if (options.prefill.empty() && options.decode.empty() && options.worker.empty()) {
    problems.push_back(invalid("no workers: give --prefill and --decode, or --worker", "worker"));
  } else if (options.prefill.empty() != options.decode.empty()) {
    const bool lacks_prefill = options.prefill.empty();
    problems.push_back(invalid(fmt::format("{} workers are configured but no {} worker",
                                           lacks_prefill ? "decode" : "prefill", lacks_prefill ? "prefill" : "decode"),
                               lacks_prefill ? "prefill" : "decode"));
  }
  return problems;
}

std::shared_ptr<policy::DecodePolicy> lock(std::unique_ptr<policy::DecodePolicy> policy) {
  return std::make_shared<policy::LockedDecode>(std::move(policy));
}

std::shared_ptr<policy::PrefillPolicy> lock(std::unique_ptr<policy::PrefillPolicy> policy) {
  return std::make_shared<policy::LockedPrefill>(std::move(policy));
}

Result<std::shared_ptr<policy::EnginePolicy>> make_engine_policy(const EngineOptions& options) {
  if (!options.on) return std::shared_ptr<policy::EnginePolicy>();
  auto made = policy::make_engine_policy(options.policy);
  if (!made) return std::move(made).error();
  return std::shared_ptr<policy::EnginePolicy>(std::make_shared<policy::LockedEngine>(*std::move(made)));
}

net::Task<void> run_on(const Loop& loop, net::Task<void> task) {
  co_await net::asio::co_spawn(loop.executor, std::move(task), net::asio::use_awaitable);
}

Core::Core(std::span<const net::asio::any_io_executor> executors, const RouterOptions& options, const Clock& time)
    : loops(make_loops(executors, options.edge.upstream)),
      executor(loops.front().executor),
      closing(loops.front().closing),
      clock(time),
      fleet(time, fleet_options(options)),
      room(time, options.decode_inflight),
      traces(fleet),
      export_client(executor, export_options(options)),
      probe_client(executor, probe_options(options)),
      leases(std::make_shared<LeaseKeeper>(executor, time)),
      gate(std::make_shared<Gate>(gate_options(options), metrics)),
      decisions(options.decisions),
      id_seed_(random_seed()) {
  gate->set_options(gate_options(options));  // tells its gauges, which were made after it
}

Result<CorePtr> Core::make(std::span<const net::asio::any_io_executor> executors, RouterOptions options,
                           const Clock& clock) {
  KINDRED_CHECK(!executors.empty());
  CorePtr core(new Core(executors, options, clock));  // the constructor is private
  const auto settings = std::make_shared<Settings>();
  settings->options = std::move(options);
  const RouterOptions& given = settings->options;
  auto retry_on = RetryStatuses::parse(given.retry_on);
  if (!retry_on) return std::move(retry_on).error();
  settings->retry_on = *retry_on;
  auto edge = Edge::make(given.edge, clock);
  if (!edge) return std::move(edge).error();
  core->edge = *std::move(edge);
  if (Status made = core->prepare_policies(*settings); !made) return std::move(made).error();
  if (Status made = prepare_engines(*settings); !made) return std::move(made).error();
  if (Status ready = core->prepare_prefixes(*settings); !ready) return std::move(ready).error();
  Result<std::unique_ptr<History>> history = History::make(given.history);
  if (!history) return std::move(history).error();
  core->history = *std::move(history);
  auto aliases = ModelAliases::parse(given.model_aliases);
  if (!aliases) return std::move(aliases).error();
  settings->aliases = *std::move(aliases);
  core->set_settings(settings);
  if (Status added = core->add_workers(given); !added) return std::move(added).error();
  if (Status loaded = core->load_cohorts(given); !loaded) return std::move(loaded).error();
  if (Status ready = core->prepare_refit(*settings); !ready) return std::move(ready).error();
  return core;
}

Core::~Core() = default;

Result<fleet::WorkerId> Core::add_worker(const std::string& url, Role role, const std::string& field,
                                         std::optional<fleet::Dialect> dialect) {
  Result<net::Endpoint> endpoint = net::parse_endpoint(url);
  if (!endpoint) return invalid(fmt::format("{}: '{}': {}", field, url, endpoint.error().message), field);
  std::optional<fleet::WorkerId> before;
  for (fleet::WorkerId id = 0; id < workers.size(); ++id) {
    if (workers[id].endpoint != *endpoint) continue;
    const fleet::WorkerStatus now = fleet.worker_status(id);
    const bool same = now.spec.role == role && now.spec.dialect == dialect;
    if (!now.removed && !(same && now.draining)) {
      return invalid(fmt::format("{}: {} is a worker already", field, url), field);
    }
    if (same) before = id;
  }
  if (before && !fleet.removed(*before)) {
    fleet.restore(*before);
    return *before;
  }
  if (fleet.size() >= kMaxWorkers) {
    return invalid(fmt::format("{}: {} workers already; at most {}", field, fleet.size(), kMaxWorkers), field);
  }
  if (before) {
    if (prefixes) {
      if (Status heard = prefixes->worker_added(*before, *endpoint); !heard) return std::move(heard).error();
    }
    fleet.restore(*before);
    return *before;
  }
  if (fleet.recorded() >= kMaxWorkerRecords) {
    return invalid(fmt::format("{}: {} different workers since the router started; restart it to add more", field,
                               fleet.recorded()),
                   field);
  }
  if (prefixes) {
    const auto next = static_cast<fleet::WorkerId>(workers.size());
    if (Status heard = prefixes->worker_added(next, *endpoint); !heard) return std::move(heard).error();
  }
  const fleet::WorkerId id = fleet.add({.url = endpoint->url(), .role = role, .dialect = dialect});
  const std::lock_guard lock(workers_mutex_);
  workers.push_back({.endpoint = *std::move(endpoint),
                     .pause = std::make_shared<net::asio::steady_timer>(executor),
                     .poll_pause = std::make_shared<net::asio::steady_timer>(executor)});
  return id;
}

Result<fleet::WorkerId> Core::member(const std::string& url) const {
  const Result<net::Endpoint> endpoint = net::parse_endpoint(url);
  if (!endpoint) return invalid(fmt::format("url: '{}': {}", url, endpoint.error().message), "url");
  for (fleet::WorkerId id = 0; id < workers.size(); ++id) {
    if (workers[id].endpoint == *endpoint && !fleet.removed(id)) return id;
  }
  return Error{ErrorCode::kNotFound, fmt::format("url: {} is not a worker of this router", endpoint->url()), "url"};
}

Result<fleet::WorkerId> Core::remove_worker(const std::string& url) {
  const Result<fleet::WorkerId> id = member(url);
  if (id) drop_worker(*id);
  return id;
}

Result<fleet::WorkerId> Core::drain_worker(const std::string& url) {
  const Result<fleet::WorkerId> id = member(url);
  if (id) fleet.drain(*id);
  return id;
}

void Core::drop_worker(fleet::WorkerId id) {
  fleet.remove(id);
  if (prefixes) prefixes->worker_removed(id);
  if (!std::exchange(workers[id].traces, {}).empty()) traces.remove(id);
  priorities.set(id, TakesPriority::kUnknown);
  workers[id].priority_asked = false;
  workers[id].pause->cancel();  // its prober ends
  workers[id].poll_pause->cancel();
}

const net::Endpoint& Core::endpoint(fleet::WorkerId id) const {
  const std::lock_guard lock(workers_mutex_);
  return workers[id].endpoint;
}

Status Core::add_workers(const RouterOptions& options) {
  std::vector<fleet::WantedWorker> wanted;
  std::vector<Error> problems = wanted_workers(options, wanted);
  if (!problems.empty()) return std::move(problems.front());
  for (const fleet::WantedWorker& worker : wanted) {
    if (auto added = add_worker(worker.url, worker.role, "worker", worker.dialect); !added) {
      return std::move(added).error();
    }
  }
  return {};
}

Status Core::load_cohorts(const RouterOptions& options) {
  if (options.cohorts.empty()) return {};
  auto loaded = expert::CohortModel::load(options.cohorts);
  if (!loaded) return std::move(loaded).error();
  const auto model = std::make_shared<const expert::CohortModel>(*std::move(loaded));
  set_cohorts(model);
  const size_t decode = fleet.count(Role::kDecode);
  // A refit finds the number that fits, and workers that may come later are no reason to refuse.
  const bool may_differ = options.refit.on || may_grow(options);
  if (!may_differ && model->cohorts() != decode) {
    return invalid(fmt::format("{} has {} cohorts but {} decode workers are configured; each decode worker needs one "
                               "(fit again with as many cohorts, or change the list)",
                               options.cohorts, model->cohorts(), decode),
                   "cohorts");
  }
  fleet.assign_cohorts(model->cohorts());
  return {};
}

Status Core::prepare_policies(Settings& settings) {
  const RouterOptions& options = settings.options;
  if (!options.experiment.arms.empty()) {
    if (options.shadow_policy) {
      return invalid("shadow_policy: not with an experiment, whose policies act in turn", "shadow_policy");
    }
    auto made = Experiment::make(options.experiment, clock);
    if (!made) return std::move(made).error();
    experiment = *std::move(made);
    settings.prefill_policy = lock(experiment->prefill_policy());
    settings.decode_policy = lock(experiment->decode_policy());
    settings.plain_policy = lock(experiment->plain_policy());
    return {};
  }
  auto prefill = policy::make_prefill_policy(options.prefill_policy);
  if (!prefill) return std::move(prefill).error();
  settings.prefill_policy = lock(*std::move(prefill));
  auto decode = make_decode_policies(options.decode_policy);
  if (!decode) return std::move(decode).error();
  auto& [with_experts, without] = *decode;
  if (options.shadow_policy) {
    if (Status put = put_shadow(*options.shadow_policy, with_experts, without); !put) return put;
  }
  settings.decode_policy = lock(std::move(with_experts));
  settings.plain_policy = lock(std::move(without));
  return {};
}

Status Core::prepare_engines(Settings& settings) {
  const RouterOptions& options = settings.options;
  if (options.engines.on && !options.experiment.arms.empty()) {
    return invalid("engine_policy: not with an experiment, whose prefill policies it would overrule", "engine_policy");
  }
  auto policy = make_engine_policy(options.engines);
  if (!policy) return std::move(policy).error();
  settings.engine_policy = *std::move(policy);
  auto sources = parse_trace_sources(options.engines.traces);
  if (!sources) return std::move(sources).error();
  settings.traces = *std::move(sources);
  return {};
}

Status Core::put_shadow(const policy::DecodePolicyOptions& of, std::unique_ptr<policy::DecodePolicy>& with_experts,
                        std::unique_ptr<policy::DecodePolicy>& without) {
  const auto told = [this](const policy::ShadowVerdict& verdict) { metrics.shadow_decided(verdict); };
  // One each, since policies have memories.
  for (auto* acting : {&with_experts, &without}) {
    auto shadow = policy::make_decode_policy(of);
    if (!shadow) return std::move(shadow).error();
    // Without experts to look at it would only say what load says.
    if (acting == &without && (*shadow)->wants_counts()) break;
    *acting = std::make_unique<policy::ShadowedDecode>(std::move(*acting), *std::move(shadow), clock, told);
  }
  return {};
}

Status Core::prepare_prefixes(const Settings& settings) {
  const RouterOptions& options = settings.options;
  const auto priced = [](const policy::DecodePolicyOptions& of) { return of.held_weight > 0; };
  const auto arm_priced = [&](const ExperimentArm& arm) { return priced(arm.decode); };
  const bool wanted = settings.prefill_policy->wants_prefix() || priced(options.decode_policy) ||
                      std::ranges::any_of(options.experiment.arms, arm_priced);
  if (!wanted) return {};
  const size_t given = options.prefill.size() + options.decode.size() + options.worker.size();
  // Those that may come; an index has room for 512.
  const size_t most = options.manage_workers ? 512 : std::clamp<size_t>(given, 1, 512);
  auto made = Prefixes::make(options.kv, static_cast<uint32_t>(most));
  if (!made) return std::move(made).error();
  prefixes = *std::move(made);
  return {};
}

Status Core::prepare_refit(const Settings& settings) {
  if (!settings.options.refit.on) return {};
  const policy::DecodePolicy& decode = *settings.decode_policy;
  if (!decode.wants_counts()) {
    return invalid(fmt::format("refit: the decode policy '{}' uses no cohorts; accepted: locality-band, "
                               "marginal-cost",
                               decode.name()),
                   "refit");
  }
  const auto model = cohorts();
  if (model && expert::uses_gates(model->data().transform)) {
    return invalid(fmt::format("refit: {} was fitted on gate sums, which prefill replies do not carry; fit it with one "
                               "of the transforms of counts",
                               settings.options.cohorts),
                   "refit");
  }
  refitter = std::make_shared<Refitter>(*this);
  return {};
}

void Core::worker_refused(fleet::WorkerId id, const std::string& why) {
  if (fleet.report_refused(id, why)) log.warn("{} is out: {}", endpoint(id).url(), why);
  std::shared_ptr<net::asio::steady_timer> pause;
  {
    const std::lock_guard lock(workers_mutex_);
    pause = workers[id].pause;
  }
  net::asio::post(executor, [pause = std::move(pause)] { pause->cancel(); });  // check now
}

void Core::worker_failed(fleet::WorkerId id, const std::string& why) {
  if (fleet.report_fault(id, fleet::Fault::kTransport)) log.warn("{}: breaker open: {}", endpoint(id).url(), why);
}

void Core::worker_answered(fleet::WorkerId id, int status) {
  if (status == 500 || status == 502 || status == 504) {
    if (fleet.report_fault(id, fleet::Fault::kAnswer)) {
      log.warn("{}: breaker open: status {}", endpoint(id).url(), status);
    }
  } else if (fleet.report_answered(id)) {
    log.info("{}: breaker closed", endpoint(id).url());
  }
}

bool Core::spawn(CorePtr core, net::Task<void> task, bool standing) {
  Loop& control = core->loops.front();
  return spawn_on(control, std::move(core), std::move(task), standing);
}

bool Core::spawn_on(Loop& loop, CorePtr core, net::Task<void> task, bool standing) {
  if (loop.closing.cancelled()) return false;
  if (core->background_.fetch_add(1) >= kMaxBackground) {
    --core->background_;
    return false;
  }
  const size_t stands = standing ? 1 : 0;
  core->standing_ += stands;
  net::asio::co_spawn(loop.executor, std::move(task), [core = std::move(core), stands](const std::exception_ptr&) {
    core->standing_ -= stands;
    --core->background_;
  });
  return true;
}

size_t Core::requests_in_flight() const { return gate->running(); }

std::string Core::new_request_id() {
  const uint64_t number = ids_++;
  return "req-" + hex64(mix64(id_seed_ ^ number)) + hex64(mix64(id_seed_ + number));
}

uint64_t Core::new_room() { return mix64(id_seed_ ^ (ids_++ | 1ULL << 63)) >> 1; }

}  // namespace kindred::router
