// Whoever stands between clients and workers in `kindred bench relay`: nginx, Kindred, other routers.
//
// Thread-safety: none.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"
#include "cli/process.h"
#include "cli/relay_backend.h"

namespace kindred::cli {

struct RelayTarget {
  std::string name;
  uint16_t port = 0;
  std::optional<Child> child;  // none: the workers themselves
};

// Processor time of all threads of a process so far. Error kNotFound: there is no such process.
Result<double> processor_time_s(int pid);
Result<uint64_t> resident_bytes(int pid);

// nginx with keep-alive connections upstream, buffering and logs off, one process.
std::string nginx_config(uint16_t port, uint16_t upstream_port, const std::string& folder);

// Each is started and answers when the call returns. Errors: kNotFound (no such program), kTimeout, with the
// last lines of its log.
Result<RelayTarget> start_nginx(const std::string& program, const RelayBackend& backend, const std::string& folder);
Result<RelayTarget> start_router(const RelayBackend& backend, const std::string& folder);
// Prefill and decode workers, locality-band, cohorts from `cohorts`.
Result<RelayTarget> start_pd_router(const RelayBackend& backend, const std::string& cohorts, const std::string& folder);
// Other routers that are in PATH: vllm-router, sglang-router, smg.
std::vector<RelayTarget> start_installed_routers(const RelayBackend& backend, const std::string& folder);

}  // namespace kindred::cli
