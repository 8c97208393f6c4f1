// `kindred bench pressure`: which engine gets a request, by pressure and by what others go by. A grid of simulations
// over length mixes, rates and seeds, with the policies that the router runs; --ablation turns the terms of the
// pressure score off, one by one.

#include "cli/bench_pressure.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

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
  ConfigSchema schema("bench pressure [OPTIONS]",
                      "Which engine gets a request: by pressure, or as others choose. Simulated, over five mixes of "
                      "prompt lengths, five rates and three seeds; all policies on the same requests.");
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
  bench.output.declare(schema, /*draws=*/true);
  if (const auto status = parse_bench_flags(schema, args)) return *status;
  const Machine machine = this_machine();
  Result<PressureGrid> grid = run_pressure_grid(bench, bench.ablation ? ablation_arms(bench) : pressure_arms(bench));
  if (!grid) return fail("bench pressure", grid.error(), grid.error().code == ErrorCode::kInvalid ? 2 : 1);
  if (bench.output.json) {
    Json json = pressure_json(*grid);
    json["machine"] = machine_json(machine);
    fmt::print("{}\n", dump_json(json, 2));
  } else {
    fmt::print("{}{}\n", pressure_text(*grid), machine_text(machine));
  }
  if (bench.output.plots.empty()) return 0;
  const std::string note = fmt::format("simulated: {}, {} requests a run", bench.profile, bench.requests);
  if (Status drawn = draw_pressure(*grid, bench.output.plots, note); !drawn) {
    return fail("bench pressure", drawn.error());
  }
  return 0;
}

}  // namespace kindred::cli
