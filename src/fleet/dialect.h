// The kinds of engines a worker can be, and what tells them apart.
//
// Thread-safety: plain values and pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/role.h"

namespace kindred::fleet {

enum class Dialect { kOpenAi, kKindred, kVllm, kSglang, kLlamaServer };
inline constexpr size_t kDialects = 5;

std::string_view to_string(Dialect dialect);
// "kindred", "vllm", "sglang", "llama-server", "openai".
std::optional<Dialect> parse_dialect(std::string_view name);
inline constexpr std::string_view kDialectNames = "kindred, vllm, sglang, llama-server, openai";

// Whether prefill and decode may be on two workers of it.
constexpr bool disaggregates(Dialect dialect) {
  return dialect == Dialect::kKindred || dialect == Dialect::kVllm || dialect == Dialect::kSglang;
}

// From `owned_by` of GET /v1/models, where each engine puts its own name.
Dialect dialect_of_owner(std::string_view owned_by);

// GET /version of vLLM, GET /get_server_info (or /server_info) of SGLang, GET /props of llama-server: what each
// adds to the list of models. Untrusted input; what is missing or of a wrong type is left out.
struct ServerInfo {
  std::optional<Dialect> dialect;  // whose answer this looks like
  std::string version;
  std::optional<Role> role;  // SGLang says what it was started as
  uint16_t bootstrap_port = 0;
};
ServerInfo parse_server_info(std::string_view json);
// Where to ask; empty: nowhere.
std::string_view server_info_path(Dialect dialect);

// The field of a body that pins a data-parallel engine of an SGLang server: `data_parallel_rank` up to 0.5.9,
// `routed_dp_rank` from 0.5.10 on, and where the version is not known.
std::string_view sglang_rank_field(std::string_view version);

// Two workers may share one KV cache only if these are equal: the model, its context, the dialect, and the
// engine's version up to its second number, within which a rolling upgrade may mix workers.
std::string pairing_fingerprint(Dialect dialect, std::string_view model, uint64_t max_model_len_tokens,
                                std::string_view version);

}  // namespace kindred::fleet
