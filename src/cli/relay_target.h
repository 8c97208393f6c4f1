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
  std::string name, version;  // as the program calls it; empty: it does not say
  uint16_t port = 0;
  std::optional<Child> child;  // none: the workers themselves
};

// Processor time so far of all threads of a process and of its children. Error kNotFound: there is no such process.
Result<double> processor_time_s(int pid);
Result<uint64_t> resident_bytes(int pid);

// nginx with keep-alive connections upstream, buffering and logs off, one process.
std::string nginx_config(uint16_t port, uint16_t upstream_port, const std::string& folder);

// Each is started and answers when the call returns. Errors: kNotFound (no such program), kTimeout, with the
// last lines of its log.
Result<RelayTarget> start_nginx(const std::string& program, const RelayBackend& backend, const std::string& folder);
Result<RelayTarget> start_router(const RelayBackend& backend, const std::string& folder, size_t threads = 1);
// Prefill and decode workers, locality-band, cohorts from `cohorts`.
Result<RelayTarget> start_pd_router(const RelayBackend& backend, const std::string& cohorts, const std::string& folder);
// Other routers: programs in PATH, or paths.
struct PeerPrograms {
  std::string vllm_router = "vllm-router", sglang_router = "sglang-router", smg = "smg";
};
struct Peers {
  std::vector<RelayTarget> started;
  std::vector<std::string> absent;  // name, and why
};
Peers start_peers(const PeerPrograms& programs, const RelayBackend& backend, const std::string& folder);

}  // namespace kindred::cli
