// `kindred simulate --serve`: a fleet of mock workers that take the time a hardware profile says.

#include <fmt/format.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/signal_set.hpp>
#include <csignal>
#include <cstdlib>

#include "cli/commands.h"
#include "cli/simulate.h"
#include "cli/terminal.h"
#include "live/faults.h"
#include "live/fleet.h"
#include "net/http_message.h"

namespace kindred::cli {
namespace {

constexpr uint32_t kServedBlockTokens = 16;
constexpr size_t kMostServedWorkers = 1024;
constexpr uint32_t kServedDraws = 1024;  // enough to meet all but surely each kind of request

struct ServeArguments {
  SimulateOptions simulate;  // of which only some have flags here
  bool serve = false;
  std::string dialect = "kindred", host = "127.0.0.1", model = "simulated", faults, cohorts_output;
  int64_t port = 8200, kv_events_port = -1, context_tokens = 32'768, output_tokens = 128, lease_ttl_ms = 30'000;
};

ConfigSchema serve_schema(ServeArguments& o) {
  ConfigSchema schema("simulate --serve [OPTIONS]",
                      "Serves a fleet of mock workers over OpenAI's API, in real time: their steps take as long as the "
                      "profile says, their words mean nothing. docs/simulator-live.md describes them.");
  SimulateOptions& s = o.simulate;
  schema.flag("serve", &o.serve, "serve, rather than simulate a trace");
  schema.text("profile", &s.profile, "hardware: a name of profiles/ or a file; `simulate profile` makes them");
  schema.text("workers", &s.workers, "P prefill and D decode workers, or B that do both: 2P4D, 3B");
  schema.choice("dialect", &o.dialect, {"kindred", "vllm", "sglang", "openai"}, "whose workers they pretend to be");
  schema.text("host", &o.host, "address to listen on");
  schema.integer("port", &o.port, 0, 65535, "of the first worker, the others follow; 0 takes free ones");
  schema.integer("kv_events_port", &o.kv_events_port, -1, 65535,
                 "publish KV events from this port on, two ports a worker; 0 takes free ones, -1: none");
  schema.text("model", &o.model, "the model's name for clients");
  schema.text("faults", &o.faults, "YAML or JSON list of what befalls workers, and when (docs/simulator-live.md)");
  schema.text("cohorts_output", &o.cohorts_output, "write a cohort file for the router's locality policies here");
  schema.integer("ranks", &s.ranks, 1, 512, "GPUs of a worker: data-parallel attention, expert-parallel experts");
  schema.integer("kv_tokens", &s.kv_tokens, 0, 1LL << 31,
                 "KV cache of a worker; 0: what its profile leaves beside weights");
  schema.integer("token_budget", &s.token_budget, 1, 1 << 20, "tokens a step");
  schema.integer("max_running", &s.max_running, 1, 1 << 16, "requests a step");
  schema.flag("no_prefix_cache", &s.no_prefix_cache, "compute every prompt as a whole");
  schema.integer("context_tokens", &o.context_tokens, 2, 1 << 24, "longest prompt and answer together");
  schema.integer("output_tokens", &o.output_tokens, 1, 1 << 20, "of requests without max_tokens");
  schema.integer("lease_ttl_ms", &o.lease_ttl_ms, 1, 86'400'000, "how long KV is kept for a decode worker");
  schema.text("experts", &s.experts,
              "synthetic, uniform, a file of `kindred record`, or a folder of token decisions (docs/simulator.md)");
  schema.integer("domains", &s.domains, 1, 256, "synthetic: kinds of requests");
  schema.real("base", &s.base, -1, 20, "synthetic: how unequal experts are for all; -1, here and below: as calibrated");
  schema.real("domain", &s.domain, -1, 20, "synthetic: how domains differ");
  schema.real("request", &s.request, -1, 20, "synthetic: how requests of a domain differ");
  schema.real("drift", &s.drift, -1, 20, "synthetic: how a request changes on its way");
  schema.real("phase", &s.phase, -1, 20, "synthetic: how decode differs from prefill");
  schema.integer("seed", &s.seed, 0, 1LL << 40, "of the experts");
  schema.accept_config_file();
  return schema;
}

Status read_faults(const ServeArguments& o, live::LiveOptions& out) {
  if (o.faults.empty()) return {};
  const Result<std::string> text = read_file(o.faults);
  if (!text) return Error{text.error().code, "--faults: " + text.error().message, "faults"};
  auto faults = live::parse_faults(*text, out.workers.size());
  if (!faults) {
    return Error{faults.error().code, fmt::format("--faults: {}: {}", o.faults, faults.error().message), "faults"};
  }
  out.faults = *std::move(faults);
  return {};
}

Result<live::LiveOptions> live_options(const ServeArguments& o, const SimulateSetup& setup) {
  live::LiveOptions out;
  out.dialect = *fleet::parse_dialect(o.dialect);  // a choice of the schema
  out.host = o.host;
  out.port = static_cast<uint16_t>(o.port);
  if (o.kv_events_port >= 0) out.kv_events_port = static_cast<uint16_t>(o.kv_events_port);
  out.model = out.fingerprint = o.model;
  out.version = KINDRED_VERSION;
  out.seed = static_cast<uint64_t>(o.simulate.seed);
  out.context_tokens = static_cast<uint32_t>(o.context_tokens);
  out.default_output_tokens = static_cast<uint32_t>(o.output_tokens);
  out.lease_ttl_ms = std::chrono::milliseconds(o.lease_ttl_ms);
  for (const sim::WorkerGroup& group : setup.cluster.groups) {
    live::WorkerSpec spec;
    spec.role = group.role;
    spec.loop.cost = group.cost;
    spec.loop.ranks = group.ranks;
    spec.loop.engines = group.engines;
    spec.loop.engine = group.engine;
    if (out.workers.size() + group.count > kMostServedWorkers) {
      return invalid(fmt::format("--workers: accepted: {} workers at most", kMostServedWorkers), "workers");
    }
    out.workers.insert(out.workers.end(), group.count, spec);
  }
  if (Status read = read_faults(o, out); !read) return std::move(read).error();
  return out;
}

// Requests of all kinds once, so that nothing has to be made while clients wait; the first of them fit the cohorts.
std::vector<sim::CalibrationRequest> draw_requests(const ServeArguments& o, sim::ExpertProcess& process) {
  constexpr uint32_t kTokens = 64;
  std::vector<sim::CalibrationRequest> out;
  Progress progress("drawing experts", kServedDraws);
  for (uint32_t i = 0; i < kServedDraws; ++i) {
    sim::TraceRequest request;
    request.prompt_tokens = request.output_tokens = kTokens;
    sim::CalibrationRequest drawn{.experts = process.experts(request, i), .decode_tokens = kTokens};
    if (i < static_cast<uint64_t>(o.simulate.calibration)) out.push_back(std::move(drawn));
    progress.set(i + 1);
  }
  return out;
}

Status write_cohorts(const ServeArguments& o, std::span<const sim::CalibrationRequest> drawn,
                     const live::LiveOptions& fleet) {
  const auto decodes = std::ranges::count(fleet.workers, Role::kDecode, &live::WorkerSpec::role);
  if (decodes == 0) return invalid("--cohorts-output is for fleets with decode workers", "cohorts_output");
  const auto recorded = sim::record_activations(drawn, fleet.fingerprint);
  if (!recorded) return recorded.error();
  const auto fitted = sim::fit_for(*recorded, static_cast<uint32_t>(decodes), fleet.seed);
  if (!fitted) return Error{fitted.error().code, "--cohorts-output: " + fitted.error().message, "cohorts_output"};
  return fitted->model->save(o.cohorts_output);
}

void print_fleet(const ServeArguments& o, std::span<const Role> roles, const live::LiveFleet& fleet) {
  const std::span<const uint16_t> ports = fleet.ports();
  std::string command = "kindred router";
  for (size_t i = 0; i < ports.size(); ++i) {
    const std::string url = net::Endpoint{o.host, ports[i]}.url();
    fmt::print("kindred simulate: worker {} ({}, {}) on {}\n", i, to_string(roles[i]), o.dialect, url);
    command += fmt::format(" --{} {}", roles[i] == Role::kBoth ? "worker" : to_string(roles[i]), url);
    const std::string events = fleet.kv_events(static_cast<uint32_t>(i));
    if (!events.empty()) command += fmt::format(" --kv-events {}={}", url, events);
  }
  if (o.kv_events_port >= 0) command += " --prefill-policy kv-aware";
  if (!o.cohorts_output.empty())
    command += fmt::format(" --decode-policy locality-band --cohorts {}", o.cohorts_output);
  fmt::print("ready; a router for them:\n  {}\n", command);
  std::fflush(stdout);
}

net::Task<void> end_fleet(live::LiveFleet& fleet, net::asio::io_context& context) {
  co_await fleet.drain(std::chrono::milliseconds(1000));
  context.stop();
}

int serve_fleet(const ServeArguments& o, live::LiveOptions options, std::unique_ptr<sim::ExpertProcess> experts) {
  const SystemClock clock;
  net::asio::io_context context(1);
  std::vector<Role> roles;
  for (const live::WorkerSpec& worker : options.workers) roles.push_back(worker.role);
  auto fleet = live::LiveFleet::make(context.get_executor(), std::move(options), std::move(experts), clock);
  if (!fleet) return fail("simulate", fleet.error(), fleet.error().code == ErrorCode::kInvalid ? 2 : 1);
  net::asio::signal_set signals(context, SIGINT, SIGTERM);
  signals.async_wait([&](boost::system::error_code error, int) {
    if (error) return;
    // A second signal does not wait.
    signals.async_wait([](boost::system::error_code again, int) {
      if (!again) std::_Exit(130);
    });
    net::asio::co_spawn(context, end_fleet(**fleet, context), net::asio::detached);
  });
  print_fleet(o, roles, **fleet);
  context.run();
  return 0;
}

int prepare_and_serve(const ServeArguments& o) {
  const auto refused = [](const Error& error) {
    return fail("simulate", error, error.code == ErrorCode::kInvalid ? 2 : 1);
  };
  SimulateSetup setup;
  Result<sim::Profile> profile = set_up_workers(o.simulate, kServedBlockTokens, setup);
  if (!profile) return refused(profile.error());
  auto experts = set_up_experts(o.simulate, *profile);
  if (!experts) return refused(experts.error());
  auto options = live_options(o, setup);
  if (!options) return refused(options.error());
  const std::vector<sim::CalibrationRequest> drawn = draw_requests(o, **experts);
  if (!o.cohorts_output.empty()) {
    if (const Status wrote = write_cohorts(o, drawn, *options); !wrote) return refused(wrote.error());
  }
  return serve_fleet(o, *std::move(options), *std::move(experts));
}

}  // namespace

int run_simulate_serve(Args args) {
  ServeArguments o;
  o.simulate.workers = "1P2D";
  ConfigSchema schema = serve_schema(o);
  const Status parsed = schema.parse_flags(args);
  if (schema.help_requested()) {
    fmt::print("{}", schema.help());
    return 0;
  }
  if (!parsed) return fail("simulate", parsed.error(), 2);
  return prepare_and_serve(o);
}

}  // namespace kindred::cli
