// What `kindred router` can be told of prefixes that workers hold (router/prefixes.h).
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace kindred::router {

struct KvOptions {
  // "WORKER_URL=tcp://host:port", or with a replay socket "WORKER_URL=tcp://host:port,tcp://host:port".
  std::vector<std::string> events;
  // Of all other workers, on the host of their URL; 0: they publish nothing, or have no replay socket.
  uint16_t events_port = 0, replay_port = 0;
  size_t index_bytes = 256ULL << 20;  // of each of the two indexes
  size_t token_bytes = 64ULL << 20;   // of token ids kept, by prompt
  std::chrono::milliseconds tokenize_timeout_ms{500};
};

}  // namespace kindred::router
