// `kindred bench`: which measurements there are.

#include "cli/bench.h"

#include <fmt/format.h>

#include <array>
#include <cstdio>
#include <string_view>

#include "cli/terminal.h"

namespace kindred::cli {
namespace {

struct Bench {
  std::string_view name, about;
  int (*run)(Args args);
};

constexpr auto kBenches = std::to_array<Bench>({
    {"assign", "the exact balanced assignment of the cohort fit", bench_assign},
    {"decide", "one routing decision, part by part", bench_decide},
#ifdef KINDRED_HAVE_ENGINE
    {"coordinate", "engines by pressure, experts by traffic, or both, on expert ranks", bench_coordinate},
    {"engine", "decode tokens/s of the step loop against llama.cpp's own", bench_engine},
    {"ranks", "expert ranks against none, counting, and a migration under load", bench_ranks},
    {"step", "step time against batch size and distinct experts: ELDR's law", bench_step},
#endif
    {"fit", "balanced k-means, and its assignment against SciPy's", bench_fit},
    {"locality", "decode policies on a cluster of paced workers", bench_locality},
    {"place", "placing experts: all solvers, their cost and time", bench_place},
    {"policies", "all decode policies on recorded and synthetic routing, simulated", bench_policies},
    {"prefix", "the index of who holds which KV blocks", bench_prefix},
    {"pressure", "which engine gets a request: by pressure, or as others choose", bench_pressure},
    {"relay", "the router as a data plane, beside nginx", bench_relay},
    {"simulate", "the simulator against real time", bench_simulate},
});

void print_benches(std::FILE* to) {
  fmt::print(to, "usage: kindred bench NAME [OPTIONS]\n\nMeasures a part of Kindred on this machine.\n\n");
  for (const Bench& bench : kBenches) fmt::print(to, "  {:<10} {}\n", bench.name, bench.about);
  fmt::print(to, "\n`kindred bench NAME --help` lists its options.\n");
}

}  // namespace

void BenchOutput::declare(ConfigSchema& schema, bool draws) {
  schema.flag("json", &json, "for machines");
  if (draws) schema.text("plots", &plots, "folder to write SVG charts to");
}

std::optional<int> parse_bench_flags(ConfigSchema& schema, Args args) {
  if (const Status parsed = schema.parse_flags(args); !parsed) return fail("bench", parsed.error(), 2);
  if (!schema.help_requested()) return std::nullopt;
  fmt::print("{}", schema.help());
  return 0;
}

int run_bench(Args args) {
  const std::string_view wanted = args.empty() ? std::string_view() : args[0];
  if (wanted.empty() || wanted == "--help" || wanted == "-h") {
    print_benches(wanted.empty() ? stderr : stdout);
    return wanted.empty() ? 2 : 0;
  }
  std::string names;
  for (const Bench& bench : kBenches) {
    if (bench.name == wanted) return bench.run(args.subspan(1));
    names += fmt::format("{}{}", names.empty() ? "" : ", ", bench.name);
  }
  return fail("bench", invalid(fmt::format("got '{}', accepted: {}", wanted, names)), 2);
}

}  // namespace kindred::cli
