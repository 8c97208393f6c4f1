#include "cli/openmp.h"

#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "base/config.h"

namespace kindred::cli {

void make_openmp_wait_passively() {
  if (std::getenv("OMP_WAIT_POLICY") != nullptr) return;
  setenv("OMP_WAIT_POLICY", "passive", 1);
  const auto line = read_file("/proc/self/cmdline");
  if (!line) return;  // not Linux; slower at worst
  std::string args = *line;
  std::vector<char*> argv;
  for (size_t at = 0; at < args.size(); at += std::strlen(args.data() + at) + 1) argv.push_back(args.data() + at);
  argv.push_back(nullptr);
  execv("/proc/self/exe", argv.data());
}

}  // namespace kindred::cli
