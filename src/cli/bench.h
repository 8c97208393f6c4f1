// What the benches share. Each is one command, `kindred bench NAME`, in a file of its own: it prints a
// table, or JSON for machines, and says on what machine. Speed is measured here and never in a test.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "base/config.h"
#include "base/json.h"
#include "cli/chat_load.h"
#include "cli/commands.h"

namespace kindred::cli {

int bench_assign(Args args);
int bench_decide(Args args);
int bench_fit(Args args);
int bench_locality(Args args);
int bench_place(Args args);
int bench_policies(Args args);
int bench_prefix(Args args);
int bench_pressure(Args args);
int bench_relay(Args args);
int bench_simulate(Args args);
#ifdef KINDRED_HAVE_ENGINE
int bench_coordinate(Args args);
int bench_engine(Args args);
int bench_ranks(Args args);
int bench_step(Args args);
#endif

double seconds(const auto& work) {
  const auto began = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

// Two ways to time: by the wall, or by the processor time of this process (all threads). The latter is for
// machines that do other things too, and says nothing of waiting.
enum class TimeBy { kWall, kProcessor };
double time_now_s(TimeBy by);  // since some origin

// Where figures were measured: processor, cores, memory, load, compiler. "unknown" for what the system
// does not say.
struct Machine {
  std::string processor, system, compiler;
  size_t cores = 0, memory_bytes = 0;
  double load = 0;  // average of the last minute, before the bench
};
Machine this_machine();
std::string machine_text(const Machine& machine);  // one line
Json machine_json(const Machine& machine);

// The flags every bench takes.
struct BenchOutput {
  bool json = false;
  std::string plots;  // folder, or empty

  void declare(ConfigSchema& schema, bool draws);
};

// Parses `args`; no value: go on. Otherwise the exit status: help was printed, or what is wrong.
std::optional<int> parse_bench_flags(ConfigSchema& schema, Args args);

}  // namespace kindred::cli
