// `kindred bench pressure`: which engine gets a request, by pressure and by what others go by. A grid of simulations
// over length mixes, rates and seeds, with the policies that the router runs; --ablation turns the terms of the
// pressure score off, one by one; --live asks processes instead (cli/bench_pressure_live.h).

#include "cli/bench_pressure.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "cli/bench_pressure_live.h"
#include "cli/terminal.h"

namespace kindred::cli {
namespace {

constexpr std::string_view kCompared = "request-count";
constexpr std::string_view kWithSjf = "+sjf-aging";

PressureArm arm_of(const PressureBench& bench, std::string_view policy, policy::QueuePolicy queue) {
  PressureArm out{.name = std::string(policy), .engine = {}, .queue = queue};
  out.engine.name = policy;
  out.engine.pressure = bench.pressure;
  if (queue == policy::QueuePolicy::kSjfAging) out.name += kWithSjf;
  return out;
}

std::vector<PressureArm> ablation_arms(const PressureBench& bench) {
  std::vector<PressureArm> out = {arm_of(bench, kCompared, policy::QueuePolicy::kFcfs),
                                  arm_of(bench, "pressure", policy::QueuePolicy::kFcfs)};
  const auto without = [&](std::string_view what, bool policy::PressureOptions::*term) {
    PressureArm arm = arm_of(bench, "pressure", policy::QueuePolicy::kFcfs);
    arm.name = fmt::format("without {}", what);
    arm.engine.pressure.*term = false;
    out.push_back(std::move(arm));
  };
  without("remaining", &policy::PressureOptions::remaining);
  without("waiting", &policy::PressureOptions::waiting);
  without("compensation", &policy::PressureOptions::compensation);
  without("KV", &policy::PressureOptions::kv);
  without("experts", &policy::PressureOptions::experts);
  PressureArm closest = arm_of(bench, "pressure", policy::QueuePolicy::kFcfs);
  closest.name = "epsilon 0";
  closest.engine.pressure.epsilon_tokens = closest.engine.pressure.epsilon_share = 0;
  out.push_back(std::move(closest));
  return out;
}

void declare_pressure(ConfigSchema& schema, policy::PressureOptions& pressure) {
  schema.real("kv_weight", &pressure.kv_weight, 0, 1e12, "pressure: tokens that a full KV cache is worth");
  schema.real("expert_weight", &pressure.expert_weight, 0, 1e12,
              "pressure: tokens per multiple of the mean expert pressure");
  schema.real("epsilon_tokens", &pressure.epsilon_tokens, 0, 1e12, "pressure: scores this close are equal");
  schema.real("epsilon_share", &pressure.epsilon_share, 0, 1, "pressure: or by this share of the mean score");
}

void declare_live(ConfigSchema& schema, PressureBench& bench) {
  schema.flag("live", &bench.live,
              "not simulated: a worker with paced engines and a router; two mixes, two rates, three policies");
  schema.integer("engines", &bench.engines, 2, 16, "live: of the worker");
  schema.integer("token_budget", &bench.token_budget, 16, 1024,
                 "live: tokens a step; with fewer, engines do less, for machines with few cores");
  schema.real("seconds", &bench.seconds, 1, 60, "live: of arrivals in a run");
  schema.list("live_rate", &bench.live_rates,
              "live: requests a second; default: 60 and 90 % of what the engines can do with the mix");
  schema.integer("longest_prompt", &bench.longest_prompt, 32, 3072,
                 "live: tokens; lengths, and pressure's constants in tokens, are scaled to it");
  schema.text("model", &bench.model, "live: GGUF file; default: the bundled one");
  schema.text("pace", &bench.pace, "live: pace profile of the engines; default: the bundled one");
}

void print_pressure(const PressureBench& bench, const Machine& machine, Json json, const std::string& text) {
  if (bench.output.json) {
    json["machine"] = machine_json(machine);
    fmt::print("{}\n", dump_json(json, 2));
  } else {
    fmt::print("{}{}\n", text, machine_text(machine));
  }
}

int fail_pressure(const Error& error) {
  return fail("bench pressure", error, error.code == ErrorCode::kInvalid ? 2 : 1);
}

int live_pressure(const PressureBench& given) {
  const Result<PressureBench> bench = live_pressure_bench(given);
  if (!bench) return fail_pressure(bench.error());
  const Machine machine = this_machine();
  const Result<PressureLive> live = run_pressure_live(*bench, pressure_arms(*bench));
  if (!live) return fail_pressure(live.error());
  print_pressure(*bench, machine, pressure_live_json(*live), pressure_live_text(*live, machine));
  return live->grid.failed == 0 ? 0 : fail_pressure(Error{ErrorCode::kUnavailable, live->first_error});
}

}  // namespace

std::vector<PressureArm> pressure_arms(const PressureBench& bench) {
  std::vector<std::string> names = bench.policies;
  if (names.empty()) {
    names = {std::string(kCompared), "pressure", "pressure+sjf-aging", "request-count+sjf-aging"};
    for (const std::string_view name : policy::engine_policy_names()) {
      if (name != kCompared && name != "pressure") names.emplace_back(name);
    }
  }
  std::vector<PressureArm> out;
  for (const std::string& name : names) {
    const bool sjf = name.ends_with(kWithSjf);
    out.push_back(arm_of(bench, std::string_view(name).substr(0, name.size() - (sjf ? kWithSjf.size() : 0)),
                         sjf ? policy::QueuePolicy::kSjfAging : policy::QueuePolicy::kFcfs));
  }
  return out;
}

int bench_pressure(Args args) {
  PressureBench bench;
  ConfigSchema schema(
      "bench pressure [OPTIONS]",
      "Which engine gets a request: by pressure, or as others choose. Simulated, over five mixes of "
      "prompt lengths, five rates and three seeds; all policies on the same requests. Or, with --live, on running "
      "processes.");
  schema.flag("quick", &bench.quick, "two mixes, two rates, one seed");
  schema.flag("ablation", &bench.ablation, "the terms of the pressure score turned off one by one, instead");
  schema.list("policy", &bench.policies,
              fmt::format("the first is what others are compared with: {}; with +sjf-aging behind it, engines' queues "
                          "take the shortest prompt first",
                          fmt::join(policy::engine_policy_names(), ", ")));
  schema.list("mix", &bench.mixes, fmt::format("of lengths: {}", fmt::join(sim::length_mix_names(), ", ")));
  schema.list("setup", &bench.setups,
              "of engines: dp2 and dp4, the default, in lockstep with expert parallelism; 2x1 and 4x1 apart");
  schema.real("scale", &bench.scale, 0.01, 100, "times the rates");
  schema.text("profile", &bench.profile, "hardware profile");
  schema.text("trace", &bench.trace, "file of requests whose lengths are reshaped; else the one in data/traces");
  schema.integer("requests", &bench.requests, 10, 1'000'000, "of a run");
  schema.integer("seeds", &bench.seeds, 1, 1000, "runs of each kind");
  schema.integer("first_seed", &bench.first_seed, 0, 1 << 30, "others for tuning than for what is reported");
  schema.integer("threads", &bench.threads, 0, 1024, "simulations side by side; 0: as many as there are cores");
  declare_pressure(schema, bench.pressure);
  declare_live(schema, bench);
  bench.output.declare(schema, /*draws=*/true);
  if (const auto status = parse_bench_flags(schema, args)) return *status;
  if (bench.live) return live_pressure(bench);
  const Machine machine = this_machine();
  Result<PressureGrid> grid = run_pressure_grid(bench, bench.ablation ? ablation_arms(bench) : pressure_arms(bench));
  if (!grid) return fail_pressure(grid.error());
  print_pressure(bench, machine, pressure_json(*grid), pressure_text(*grid));
  if (bench.output.plots.empty()) return 0;
  const std::string note = fmt::format("simulated: {}, {} requests a run", bench.profile, bench.requests);
  if (Status drawn = draw_pressure(*grid, bench.output.plots, note); !drawn) {
    return fail("bench pressure", drawn.error());
  }
  return 0;
}

}  // namespace kindred::cli
