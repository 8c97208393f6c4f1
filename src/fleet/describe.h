// What a worker says of itself: the answer to GET /v1/models (docs/kindred-dialect.md, section 4).
//
// Thread-safety: plain values and pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.h"
#include "base/role.h"
#include "expert/counts.h"
#include "fleet/dialect.h"

namespace kindred::fleet {

struct Description {
  Dialect dialect = Dialect::kOpenAi;
  std::vector<std::string> models;    // ids, at least one
  uint64_t max_model_len_tokens = 0;  // 0: not said; of the first model
  // Of LoRA adapters among the models: id and base model.
  std::vector<std::pair<std::string, std::string>> adapters;
  std::string owner;            // `owned_by` of the first model, as it was given
  std::string version;          // of the engine, if it said one
  uint16_t bootstrap_port = 0;  // SGLang prefill workers
  Role role = Role::kBoth;      // as it says itself; only kindred and SGLang do
  std::string fingerprint;      // prefill and decode workers pair by it; empty: not told yet

  // Of kindred workers only, which serve exactly one model.
  expert::ExpertShape shape;  // no cells for a model without experts
  std::string paced;          // the profile whose times its steps are padded to; empty: its own times
  uint32_t engines = 1;       // data-parallel ones
  std::string traces;         // where it publishes its engines' traces: a ZMQ endpoint; empty: nowhere

  bool serves(std::string_view model) const;
  bool operator==(const Description&) const = default;
};

// Untrusted input. The dialect is kindred where the model carries a `kindred` object, else the owner's
// (fleet/dialect.h).
// Error: kCorrupt, naming what is wrong.
Result<Description> parse_models(std::string_view json);

// Adds what the engine's own endpoint says, and the fingerprint that vLLM and SGLang workers pair by.
// `configured`: the dialect that the operator named, which wins.
void complete(Description& description, const ServerInfo& info, std::optional<Dialect> configured);

}  // namespace kindred::fleet
