#include <array>
#include <cstdio>
#include <string_view>

#include <fmt/format.h>

#include "base/config.h"
#include "cli/commands.h"

namespace kindred::cli {
namespace {

struct Command {
  std::string_view name;
  std::string_view about;
  int (*run)(Args);
};

constexpr auto kCommands = std::to_array<Command>({
#ifdef KINDRED_HAVE_ENGINE
    {"worker", "serve a GGUF model: prefill, decode or both", run_worker},
#endif
    {"router", "route requests over a fleet of workers by expert locality", run_router},
    {"picker", "choose workers for a gateway: Envoy's ext_proc, Gateway API's InferencePool", run_picker},
    {"demo", "start a small cluster here, send prompts through it, show what routing did", run_demo},
    {"record", "send prompts through a worker and keep their expert counts", run_record},
    {"fit", "make a cohort file for the router from recorded expert counts", run_fit},
    {"place", "place experts on the ranks of expert parallelism where their traffic comes from", run_place},
    {"reproduce", "predict published results of clusters in the simulator, with the error shown", run_reproduce},
    {"simulate", "try policies on a simulated cluster", run_simulate},
    {"bench", "measure parts of Kindred on this machine", run_bench},
    {"status", "show a running router: workers, cohorts, last decisions", run_status},
#ifdef KINDRED_HAVE_ENGINE
    {"model", "inspect, quantise and widen GGUF models", run_model},
#endif
});

void print_help(std::FILE* to) {
  fmt::print(to, "kindred {}: schedules Mixture-of-Experts inference\n\nusage: kindred COMMAND [OPTIONS]\n\n",
             KINDRED_VERSION);
  for (const Command& command : kCommands) fmt::print(to, "  {:<10} {}\n", command.name, command.about);
  fmt::print(to, "\n`kindred COMMAND --help` lists a command's options.\n");
}

int run(int argc, char** argv) {
  if (argc < 2) {
    print_help(stderr);
    return 2;
  }
  const std::string_view wanted = argv[1];
  if (wanted == "--help" || wanted == "-h" || wanted == "help") {
    print_help(stdout);
    return 0;
  }
  if (wanted == "--version" || wanted == "version") {
    fmt::print("kindred {}\n", KINDRED_VERSION);
    return 0;
  }
  std::string_view nearest;
  size_t best = 4;  // more edits than this is not a slip of the finger
  for (const Command& command : kCommands) {
    if (command.name == wanted) return command.run(Args(argv + 2, static_cast<size_t>(argc - 2)));
    const size_t distance = edit_distance(wanted, command.name);
    if (distance < best) {
      best = distance;
      nearest = command.name;
    }
  }
  fmt::print(stderr, "kindred: unknown command '{}'{}\n", wanted,
             nearest.empty() ? "" : fmt::format("; did you mean '{}'?", nearest));
  return 2;
}

}  // namespace
}  // namespace kindred::cli

int main(int argc, char** argv) { return kindred::cli::run(argc, argv); }
