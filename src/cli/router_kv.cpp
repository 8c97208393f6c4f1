#include "cli/router_kv.h"

#include <chrono>

namespace kindred::cli {

void KvArguments::add_to(ConfigSchema& schema) {
  schema.list("kv_events", &kv_events,
              "kv-aware: a worker's KV events, WORKER_URL=tcp://host:port[,tcp://host:port]; the second replays");
  schema.integer("kv_events_port", &kv_events_port, 0, 65535, "kv-aware: of the other workers' KV events; 0: none");
  schema.integer("kv_replay_port", &kv_replay_port, 0, 65535, "kv-aware: of their replay sockets; 0: none");
  schema.integer("kv_index_bytes", &kv_index_bytes, 64 << 10, 4LL << 30,
                 "kv-aware: of each index of what workers hold, about 39 bytes a block");
  schema.integer("kv_token_bytes", &kv_token_bytes, 0, 64LL << 30, "kv-aware: of token ids kept by prompt");
  schema.integer("tokenize_timeout_ms", &tokenize_timeout_ms, 1, 60'000,
                 "kv-aware: for a worker to tokenise a prompt; then it is looked up by its bytes");
  schema.real("held_weight", &held_weight, 0, 1e9,
              "requests of load that a conversation's KV at a decode worker is worth; 0: it is not looked at");
}

void KvArguments::apply(router::RouterOptions& out) const {
  out.kv.events = kv_events;
  out.kv.events_port = static_cast<uint16_t>(kv_events_port);
  out.kv.replay_port = static_cast<uint16_t>(kv_replay_port);
  out.kv.index_bytes = static_cast<size_t>(kv_index_bytes);
  out.kv.token_bytes = static_cast<size_t>(kv_token_bytes);
  out.kv.tokenize_timeout_ms = std::chrono::milliseconds(tokenize_timeout_ms);
  out.decode_policy.held_weight = held_weight;
}

}  // namespace kindred::cli
