// `kindred simulate`: a cluster that nobody has to own, under the policies that the router runs.

#include "cli/simulate.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <ctime>
#include <string_view>

#include "cli/commands.h"
#include "cli/terminal.h"
#include "policy/decode_policy.h"
#include "policy/engine_policy.h"
#include "policy/prefill_policy.h"
#include "policy/queue_order.h"

namespace kindred::cli {
namespace {

struct Word {
  std::string_view name;
  int (*run)(Args args);
};
constexpr auto kWords = std::to_array<Word>({{"profile", run_simulate_profile},
                                             {"calibrate", run_simulate_calibrate},
                                             {"advise", run_simulate_advise},
                                             {"--advise", run_simulate_advise}});

constexpr size_t kTraceSteps = 200'000;  // of a Perfetto trace: about 30 MB

std::vector<std::string> listed(std::span<const std::string_view> given) { return {given.begin(), given.end()}; }

}  // namespace

void SimulateOptions::declare(ConfigSchema& schema) {
  schema.text("profile", &profile, "hardware: a name of profiles/ or a file; `simulate profile` makes them");
  schema.text("workers", &workers,
              "P prefill and D decode workers, or B that do both: 8P16D, 24B; unlike ones with a profile behind a "
              "colon: 8P,8D:h200-qwen3-30b-a3b,8D:h100-qwen3-30b-a3b");
  schema.integer("ranks", &ranks, 1, 512, "GPUs of a worker: data-parallel attention, expert-parallel experts");
  schema.integer("engines", &engines, 0, 64,
                 "data-parallel engines of a worker; 0: one for each of its ranks. With several ranks they go in "
                 "lockstep, with one they are replicas with a GPU each");
  schema.integer("kv_tokens", &kv_tokens, 0, 1LL << 31,
                 "KV cache of a worker; 0: what its profile leaves beside weights");
  schema.integer("token_budget", &token_budget, 1, 1 << 20, "tokens a step");
  schema.integer("max_running", &max_running, 1, 1 << 16, "requests a step");
  schema.flag("no_prefix_cache", &no_prefix_cache, "compute every prompt as a whole");
  schema.list("policy", &policies,
              "decode policy; several are compared with the first: " +
                  fmt::format("{}", fmt::join(policy::decode_policy_names(), ", ")));
  schema.choice("prefill_policy", &prefill_policy, listed(policy::prefill_policy_names()), "for prefill workers");
  schema.list("engine_policy", &engine_policies,
              "the router chooses engines, for prefill and for whole requests; several are compared with the first, "
              "under the first --policy: " +
                  fmt::format("{}", fmt::join(policy::engine_policy_names(), ", ")));
  schema.choice("queue_policy", &queue_policy, listed(policy::queue_policy_names()), "who is next at an engine");
  schema.real("queue_age", &queue_age, 0, 1e6, "sjf-aging: seconds after which who waits comes first");
  schema.integer("trace_ms", &trace_ms, 1, 86'400'000, "between two traces of an engine, at least");
  schema.integer("trace_delay_ms", &trace_delay_ms, 0, 60'000, "of a trace on its way");
  schema.real("tau", &tau, 0, 2, "locality-band: similarity a candidate may lose to the best");
  schema.real("load_cap", &load_cap, 0, 1e9, "locality-band, domain: multiple of the mean load, at least 1; 0: none");
  schema.choice("tie_break", &tie_break, {"rotate", "lowest-index", "random"}, "who wins among equals");
  schema.choice("load", &load, {"requests", "tokens", "polled", "pressure"}, "what policies read as load");
  schema.integer("poll_ms", &poll_ms, 1, 86'400'000, "between two looks at workers' load, with --load polled");
  schema.integer("probe_ms", &probe_ms, 1, 86'400'000, "between two health checks");
  schema.integer("routers", &routers, 1, 64, "routers side by side, each of which knows its own requests only");
  schema.integer("retries", &retries, 0, 10, "of a leg whose worker fails");
  schema.integer("decode_inflight", &decode_inflight, 0, 1'000'000, "requests a decode worker takes; 0: any number");
  schema.list("event", &events, "SECONDS:KIND:WORKER, KIND one of fail, leave, join: 30:fail:decode-3");
  schema.text("trace", &trace, "file of requests: Mooncake, Azure, BurstGPT or Kindred's own; else they are drawn");
  schema.flag("resample", &resample, "draw requests from the trace, at the --rate, instead of as they came");
  schema.real("rate", &rate, 1e-6, 1e6, "requests a second, if they are drawn");
  schema.real("burstiness", &burstiness, 1e-3, 1e6,
              "of arrivals that are drawn: 1 Poisson, less is burstier, more even");
  schema.real("seconds", &seconds, 1e-3, 1e7, "for how long they arrive, if they are drawn");
  schema.integer("prompt_tokens", &prompt_tokens, 1, 1 << 24, "mean of requests that are drawn without a trace");
  schema.integer("output_tokens", &output_tokens, 1, 1 << 24, "mean of requests that are drawn without a trace");
  schema.choice("lengths", &lengths, {"even", "fixed"}, "from 1 to twice the mean, evenly, or the mean itself");
  schema.integer("requests", &most_requests, 1, 100'000'000, "at most so many");
  schema.real("warmup", &warmup, 0, 1e7, "seconds whose requests are left out of latencies");
  schema.text("experts", &experts,
              "synthetic, uniform, a file of `kindred record`, or a folder of token decisions (docs/simulator.md)");
  schema.integer("domains", &domains, 1, 256, "synthetic: kinds of requests");
  schema.real("base", &base, -1, 20, "synthetic: how unequal experts are for all; -1, here and below: as calibrated");
  schema.real("domain", &domain, -1, 20, "synthetic: how domains differ");
  schema.real("request", &request, -1, 20, "synthetic: how requests of a domain differ");
  schema.real("drift", &drift, -1, 20, "synthetic: how a request changes on its way");
  schema.real("phase", &phase, -1, 20, "synthetic: how decode differs from prefill");
  schema.text("cohorts", &cohorts, "cohort file of `kindred fit`; without it they are fitted to other requests");
  schema.integer("calibration", &calibration, 2, 100'000, "requests that cohorts are fitted to");
  schema.integer("seed", &seed, 0, 1LL << 40, "equal seeds give equal results");
  schema.flag("json", &json, "for machines");
  schema.flag("per_worker", &per_worker, "a table of workers, too");
  schema.text("csv", &csv, "file: a line a request; with several policies, one each");
  schema.text("plots", &plots, "folder to write SVG charts to");
  schema.text("perfetto", &perfetto,
              "file: a trace of the first steps for ui.perfetto.dev; with several policies, one each");
}

Result<std::vector<SimulateRun>> simulate_all(const SimulateOptions& options, const SimulateSetup& setup) {
  std::vector<SimulateRun> runs;
  const bool by_engine = !options.engine_policies.empty();
  const std::vector<std::string>& names = by_engine ? options.engine_policies : options.policies;
  const size_t all = setup.requests.size() * names.size();
  Progress progress(names.size() > 1 ? "simulating, all policies" : "simulating", all);
  for (const std::string& policy : names) {
    sim::ClusterOptions cluster = setup.cluster;
    cluster.router.decode.name = by_engine ? options.policies.front() : policy;
    if (by_engine) cluster.router.engine->name = policy;
    cluster.step_records = options.perfetto.empty() ? 0 : kTraceSteps;
    cluster.on_ended = [&](size_t ended) { progress.set(runs.size() * setup.requests.size() + ended); };
    const std::clock_t began = std::clock();
    Result<sim::SimResult> result = sim::run_cluster(cluster, setup.requests);
    if (!result) return std::move(result).error();
    SimulateRun run;
    run.policy = policy;
    run.took_s = static_cast<double>(std::clock() - began) / CLOCKS_PER_SEC;
    run.summary = sim::summarize(*result, options.warmup);
    run.result = *std::move(result);
    runs.push_back(std::move(run));
  }
  return runs;
}

int run_simulate(Args args) {
  for (const Word& word : kWords) {
    if (!args.empty() && args[0] == word.name) return word.run(args.subspan(1));
  }
  const auto serves = [](std::string_view arg) { return arg == "--serve"; };
  if (std::ranges::any_of(args, serves)) return run_simulate_serve(args);
  SimulateOptions options;
  ConfigSchema schema(
      "simulate [OPTIONS] | simulate --serve [OPTIONS] | simulate profile|calibrate|advise [OPTIONS]",
      "Simulates a cluster, event by event, under the router's own policies: which experts each request "
      "uses, how long each step takes by a hardware profile. docs/simulator.md says what is modelled and "
      "what is not.");
  options.declare(schema);
  schema.accept_config_file();
  if (const Status parsed = schema.parse_flags(args); !parsed) return fail("simulate", parsed.error(), 2);
  if (schema.help_requested()) {
    fmt::print("{}", schema.help());
    return 0;
  }
  Result<SimulateSetup> setup = set_up_simulation(options);
  if (!setup) return fail("simulate", setup.error(), setup.error().code == ErrorCode::kInvalid ? 2 : 1);
  Result<std::vector<SimulateRun>> runs = simulate_all(options, *setup);
  if (!runs) return fail("simulate", runs.error(), runs.error().code == ErrorCode::kInvalid ? 2 : 1);
  fmt::print("{}", options.json ? dump_json(simulate_json(options, *setup, *runs), 2) + "\n"
                                : simulate_text(options, *setup, *runs));
  if (Status saved = save_simulation(options, *setup, *runs); !saved) return fail("simulate", saved.error());
  return 0;
}

}  // namespace kindred::cli
