// A fleet of mock workers: what it consists of, and what befalls it.
//
// Thread-safety: plain values.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/role.h"
#include "fleet/dialect.h"
#include "live/worker_loop.h"

namespace kindred::live {

struct WorkerSpec {
  Role role = Role::kBoth;
  LoopOptions loop;
};

enum class FaultKind {
  kKill,         // its port closes, its connections and its KV are gone
  kRestart,      // kill, if it lives, and back at once
  kStall,        // no step ends; it still answers /health
  kSlow,         // steps take `factor` times as long
  kReset,        // requests in flight are cut, the worker goes on
  kWrongCounts,  // its expert counts do not add up
};

struct Fault {
  double at_s = 0;  // since the fleet started to listen
  uint32_t worker = 0;
  FaultKind kind = FaultKind::kKill;
  double for_s = 0;   // kill, stall, slow, wrong_counts: until it is undone; 0: not by itself
  double factor = 1;  // slow
};

struct LiveOptions {
  std::vector<WorkerSpec> workers;
  fleet::Dialect dialect = fleet::Dialect::kKindred;  // not llama-server
  std::string host = "127.0.0.1";
  uint16_t port = 0;  // worker i listens on port + i; 0: on free ones
  // Worker i publishes KV events on kv_events_port + 2 i and replays them on the next port, if it caches prompts;
  // 0: on free ones. Without: nobody does.
  std::optional<uint16_t> kv_events_port = std::nullopt;
  std::string model = "simulated";
  std::string fingerprint = "simulated";
  std::string version = "0";  // what it says of itself where a dialect asks
  uint64_t seed = 1;
  uint32_t context_tokens = 32'768;
  uint32_t default_output_tokens = 128;  // of requests without a limit
  std::chrono::milliseconds lease_ttl_ms{30'000};
  std::vector<Fault> faults = {};
};

}  // namespace kindred::live
