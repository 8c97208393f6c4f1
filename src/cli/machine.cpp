#include <fmt/format.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <cstdlib>
#include <ctime>
#include <fstream>
#include <string>

#include "cli/bench.h"

namespace kindred::cli {
namespace {

std::string processor_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.starts_with("model name")) {
      const size_t at = line.find(": ");
      if (at != std::string::npos) return line.substr(at + 2);
    }
  }
  return "unknown processor";
}

std::string compiler_name() {
#if defined(__clang__)
  return "clang " __clang_version__;
#else
  return "g++ " __VERSION__;
#endif
}

}  // namespace

double time_now_s(TimeBy by) {
  timespec now{};
  clock_gettime(by == TimeBy::kWall ? CLOCK_MONOTONIC : CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

Machine this_machine() {
  Machine machine;
  machine.processor = processor_name();
  machine.compiler = compiler_name();
  utsname system{};
  machine.system = uname(&system) == 0 ? fmt::format("{} {}", system.sysname, system.release) : "unknown system";
  const long cores = sysconf(_SC_NPROCESSORS_ONLN), pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
  machine.cores = cores > 0 ? static_cast<size_t>(cores) : 0;
  machine.memory_bytes = pages > 0 && page > 0 ? static_cast<size_t>(pages) * static_cast<size_t>(page) : 0;
  double loads[1] = {0};
  if (getloadavg(loads, 1) == 1) machine.load = loads[0];
  return machine;
}

std::string machine_text(const Machine& machine) {
  return fmt::format("on {}, {} cores, {:.0f} GiB, {}, {}; load {:.1f} before", machine.processor, machine.cores,
                     static_cast<double>(machine.memory_bytes) / (1ULL << 30), machine.system, machine.compiler,
                     machine.load);
}

Json machine_json(const Machine& machine) {
  return {{"processor", machine.processor},       {"system", machine.system},
          {"compiler", machine.compiler},         {"cores", machine.cores},
          {"memory_bytes", machine.memory_bytes}, {"load_before", machine.load}};
}

}  // namespace kindred::cli
