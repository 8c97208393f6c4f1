// `kindred simulate --serve`: a fleet of mock workers that take the time a hardware profile says.

#include <fmt/format.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/signal_set.hpp>
#include <cctype>
#include <charconv>
#include <csignal>
#include <cstdlib>
#include <numeric>

#include "base/config.h"
#include "cli/commands.h"
#include "cli/terminal.h"
#include "live/faults.h"
#include "live/fleet.h"
#include "net/http_message.h"
#include "sim/cohort_fit.h"
#include "sim/profile.h"

namespace kindred::cli {
namespace {

constexpr size_t kMostMockWorkers = 1024;
constexpr uint32_t kBlockTokens = 16;

struct ServeArguments {
  bool serve = false;
  std::string profile, workers = "1P2D", dialect = "kindred", host = "127.0.0.1";
  std::string experts = "synthetic", model = "simulated", faults, cohorts;
  int64_t port = 8200, kv_events_port = 0, seed = 1, ranks = 1, context_tokens = 32'768, output_tokens = 128;
  int64_t token_budget = 8192, sequences = 256, layers = 0, lease_ttl_ms = 30'000;
  double base = 1, domain = 1, request = 0.4, phase = 0.4;
};

ConfigSchema serve_schema(ServeArguments& o) {
  ConfigSchema schema("simulate --serve --profile profiles/h200-qwen3-30b-a3b.json [OPTIONS]",
                      "Serves a fleet of mock workers over OpenAI's API, in real time: their steps take as long as the "
                      "profile says, their words mean nothing. docs/simulator-live.md describes them.");
  schema.flag("serve", &o.serve, "serve, rather than simulate a trace");
  schema.text("profile", &o.profile, "JSON file of `kindred simulate profile` (required)");
  schema.text("workers", &o.workers, "how many of each: 2P4D is two prefill and four decode workers, 3B three that do both");
  schema.choice("dialect", &o.dialect, {"kindred", "vllm", "sglang", "openai"}, "whose workers they pretend to be");
  schema.text("host", &o.host, "address to listen on");
  schema.integer("port", &o.port, 0, 65535, "of the first worker, the others follow; 0 takes free ones");
  schema.integer("kv_events_port", &o.kv_events_port, 0, 65535, "publish KV events from this port on, one a worker; 0: none");
  schema.text("model", &o.model, "the model's name for clients");
  schema.text("experts", &o.experts, "which experts requests use: synthetic, uniform, or a file of `kindred record`");
  schema.real("base", &o.base, 0, 10, "synthetic: how uneven experts are for everybody");
  schema.real("domain", &o.domain, 0, 10, "synthetic: how much domains differ");
  schema.real("request", &o.request, 0, 10, "synthetic: how much requests differ from their domain");
  schema.real("phase", &o.phase, 0, 10, "synthetic: how much decode differs from prefill");
  schema.integer("layers", &o.layers, 0, 1024, "MoE layers to follow, the first ones; 0: all");
  schema.integer("ranks", &o.ranks, 1, 1024, "GPUs of a worker, with the experts shared out among them");
  schema.integer("context_tokens", &o.context_tokens, 2, 1 << 24, "longest prompt and answer together");
  schema.integer("output_tokens", &o.output_tokens, 1, 1 << 20, "of requests without max_tokens");
  schema.integer("token_budget", &o.token_budget, 1, 1 << 20, "tokens a step");
  schema.integer("sequences", &o.sequences, 1, 65'536, "requests in a step");
  schema.integer("lease_ttl_ms", &o.lease_ttl_ms, 1, 86'400'000, "how long KV is kept for a decode worker");
  schema.integer("seed", &o.seed, 0, INT64_MAX, "of the experts");
  schema.text("faults", &o.faults, "YAML or JSON list of what befalls workers, and when");
  schema.text("cohorts", &o.cohorts, "write a cohort file for the router's locality policies here");
  schema.accept_config_file();
  return schema;
}

// "2P4D".
Result<std::vector<Role>> parse_workers(std::string_view text) {
  const auto refused = [&] {
    return invalid(fmt::format("--workers: got '{}'; accepted: counts and P, D or B as in 2P4D or 3B, {} in all", text,
                               kMostMockWorkers),
                   "workers");
  };
  std::vector<Role> out;
  for (const char* at = text.data(); at < text.data() + text.size(); ++at) {
    size_t count = 0;
    const auto [end, error] = std::from_chars(at, text.data() + text.size(), count);
    if (error != std::errc() || end == text.data() + text.size()) return refused();
    const int kind = std::toupper(static_cast<unsigned char>(*end));
    if ((kind != 'P' && kind != 'D' && kind != 'B') || count + out.size() > kMostMockWorkers) return refused();
    out.insert(out.end(), count, kind == 'P' ? Role::kPrefill : kind == 'D' ? Role::kDecode : Role::kBoth);
    at = end;
  }
  if (out.empty()) return refused();
  return out;
}

Result<std::unique_ptr<sim::ExpertProcess>> make_experts(const ServeArguments& o, const sim::Profile& profile) {
  expert::ExpertShape shape;
  const uint32_t layers = profile.dims.moe_layers;
  shape.layers.resize(o.layers == 0 ? layers : std::min(layers, static_cast<uint32_t>(o.layers)));
  std::iota(shape.layers.begin(), shape.layers.end(), profile.dims.layers - layers);
  shape.experts = profile.dims.experts;
  shape.top_k = profile.dims.top_k;
  const auto seed = static_cast<uint64_t>(o.seed);
  if (o.experts == "uniform") return sim::make_uniform(std::move(shape), seed);
  if (o.experts == "synthetic") {
    sim::SyntheticOptions options;
    options.shape = std::move(shape);
    options.base = o.base;
    options.domain = o.domain;
    options.request = o.request;
    options.phase = o.phase;
    options.prototypes = 8;
    options.seed = seed;
    return sim::make_synthetic(std::move(options));
  }
  const auto recorded = expert::Activations::load(o.experts);
  if (!recorded) {
    return Error{recorded.error().code,
                 fmt::format("--experts: accepted: synthetic, uniform, or a file of `kindred record`: {}",
                             recorded.error().message),
                 "experts"};
  }
  return sim::make_recorded(*recorded, seed);
}

// Requests of all kinds once, so that nothing is made while clients wait; the same requests fit the cohorts.
Result<std::vector<sim::CalibrationRequest>> draw_requests(sim::ExpertProcess& process) {
  constexpr uint32_t kRequests = 256, kTokens = 64;
  std::vector<sim::CalibrationRequest> out;
  Progress progress("drawing experts", kRequests);
  for (uint32_t i = 0; i < kRequests; ++i) {
    sim::TraceRequest request;
    request.prompt_tokens = request.output_tokens = kTokens;
    out.push_back({.experts = process.experts(request, i), .decode_tokens = kTokens});
    progress.set(i + 1);
  }
  return out;
}

Status write_cohorts(const ServeArguments& o, std::span<const sim::CalibrationRequest> drawn, size_t decode_workers) {
  if (decode_workers == 0) return invalid("--cohorts is for fleets with decode workers", "cohorts");
  const auto recorded = sim::record_activations(drawn, o.model);
  if (!recorded) return recorded.error();
  const auto fitted = sim::fit_for(*recorded, static_cast<uint32_t>(decode_workers), static_cast<uint64_t>(o.seed));
  if (!fitted) return Error{fitted.error().code, "--cohorts: " + fitted.error().message, "cohorts"};
  return fitted->model->save(o.cohorts);
}

struct Prepared {
  live::LiveOptions options;
  std::unique_ptr<sim::ExpertProcess> experts;
};

Result<live::LiveOptions> live_options(const ServeArguments& o, sim::Profile profile) {
  const auto ranks = static_cast<uint32_t>(o.ranks);
  if (const Status fits = profile.check_ranks(ranks); !fits) return Error{ErrorCode::kInvalid, "--ranks: " + fits.error().message, "ranks"};
  const uint64_t blocks = profile.kv_capacity_tokens(ranks) / kBlockTokens;
  const Result<std::vector<Role>> roles = parse_workers(o.workers);
  if (!roles) return roles.error();
  live::LiveOptions out;
  out.dialect = *fleet::parse_dialect(o.dialect);  // a choice of the schema
  out.host = o.host;
  out.port = static_cast<uint16_t>(o.port);
  out.kv_events_port = static_cast<uint16_t>(o.kv_events_port);
  out.model = out.fingerprint = o.model;
  out.version = KINDRED_VERSION;
  out.seed = static_cast<uint64_t>(o.seed);
  out.context_tokens = static_cast<uint32_t>(o.context_tokens);
  out.default_output_tokens = static_cast<uint32_t>(o.output_tokens);
  out.lease_ttl_ms = std::chrono::milliseconds(o.lease_ttl_ms);
  const auto cost = std::make_shared<sim::ProfileCost>(std::move(profile));
  for (const Role role : *roles) {
    live::WorkerSpec spec;
    spec.role = role;
    spec.loop.cost = cost;
    spec.loop.ranks = ranks;
    spec.loop.engine.kv.blocks = static_cast<uint32_t>(std::min<uint64_t>(blocks, 1U << 26));
    spec.loop.engine.kv.block_tokens = spec.loop.engine.kv.piece_tokens = kBlockTokens;
    spec.loop.engine.kv.cache = role != Role::kDecode;
    spec.loop.engine.token_budget = static_cast<uint32_t>(o.token_budget);
    spec.loop.engine.max_running = static_cast<uint32_t>(o.sequences);
    out.workers.push_back(std::move(spec));
  }
  if (o.faults.empty()) return out;
  const Result<std::string> text = read_file(o.faults);
  if (!text) return Error{text.error().code, "--faults: " + text.error().message, "faults"};
  auto faults = live::parse_faults(*text, out.workers.size());
  if (!faults) return Error{faults.error().code, fmt::format("--faults: {}: {}", o.faults, faults.error().message), "faults"};
  out.faults = *std::move(faults);
  return out;
}

Result<Prepared> prepare(const ServeArguments& o) {
  if (o.profile.empty()) return invalid("--profile is missing: profiles/ holds those that ship", "profile");
  Result<sim::Profile> profile = sim::load_profile(o.profile);
  if (!profile) return Error{profile.error().code, "--profile: " + profile.error().message, "profile"};
  Prepared out;
  auto experts = make_experts(o, *profile);
  if (!experts) return std::move(experts).error();
  out.experts = *std::move(experts);
  if (const Status fit = profile->check_experts(out.experts->shape()); !fit) return fit.error();
  auto options = live_options(o, *std::move(profile));
  if (!options) return std::move(options).error();
  out.options = *std::move(options);
  const auto drawn = draw_requests(*out.experts);
  if (!drawn) return drawn.error();
  if (!o.cohorts.empty()) {
    const auto decodes = std::ranges::count(out.options.workers, Role::kDecode, &live::WorkerSpec::role);
    if (const Status wrote = write_cohorts(o, *drawn, static_cast<size_t>(decodes)); !wrote) return wrote.error();
  }
  return out;
}

void print_fleet(const ServeArguments& o, std::span<const Role> roles, std::span<const uint16_t> ports) {
  std::string command = "kindred router";
  for (size_t i = 0; i < ports.size(); ++i) {
    const std::string url = net::Endpoint{o.host, ports[i]}.url();
    fmt::print("kindred simulate: worker {} ({}, {}) on {}", i, to_string(roles[i]), o.dialect, url);
    if (o.kv_events_port != 0) fmt::print(", KV events on port {}", static_cast<size_t>(o.kv_events_port) + i);
    fmt::print("\n");
    command += fmt::format(" --{} {}", roles[i] == Role::kBoth ? "worker" : to_string(roles[i]), url);
    if (o.kv_events_port != 0) {
      command += fmt::format(" --kv-events {}=tcp://{}:{}", url, o.host, static_cast<size_t>(o.kv_events_port) + i);
    }
  }
  if (!o.cohorts.empty()) command += fmt::format(" --decode-policy locality-band --cohorts {}", o.cohorts);
  fmt::print("ready; a router for them:\n  {}\n", command);
  std::fflush(stdout);
}

net::Task<void> run_down(live::LiveFleet& fleet, net::asio::io_context& context) {
  co_await fleet.drain(std::chrono::milliseconds(1000));
  context.stop();
}

int serve_fleet(const ServeArguments& o, Prepared prepared) {
  const SystemClock clock;
  net::asio::io_context context(1);
  std::vector<Role> roles;
  for (const live::WorkerSpec& worker : prepared.options.workers) roles.push_back(worker.role);
  auto fleet = live::LiveFleet::make(context.get_executor(), std::move(prepared.options), std::move(prepared.experts),
                                     clock);
  if (!fleet) return fail("simulate", fleet.error());
  net::asio::signal_set signals(context, SIGINT, SIGTERM);
  signals.async_wait([&](boost::system::error_code error, int) {
    if (error) return;
    // A second signal does not wait.
    signals.async_wait([](boost::system::error_code again, int) {
      if (!again) std::_Exit(130);
    });
    net::asio::co_spawn(context, run_down(**fleet, context), net::asio::detached);
  });
  print_fleet(o, roles, (*fleet)->ports());
  context.run();
  return 0;
}

}  // namespace

int run_simulate_serve(Args args) {
  ServeArguments o;
  ConfigSchema schema = serve_schema(o);
  const Status parsed = schema.parse_flags(args);
  if (schema.help_requested()) {
    fmt::print("{}", schema.help());
    return 0;
  }
  if (!parsed) return fail("simulate", parsed.error(), 2);
  auto prepared = prepare(o);
  if (!prepared) return fail("simulate", prepared.error(), prepared.error().code == ErrorCode::kInvalid ? 2 : 1);
  return serve_fleet(o, *std::move(prepared));
}

}  // namespace kindred::cli
