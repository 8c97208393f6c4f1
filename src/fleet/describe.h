// What a worker says of itself: the answer to GET /v1/models (docs/kindred-dialect.md, section 4).
//
// Thread-safety: plain values and pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "base/role.h"
#include "expert/counts.h"

namespace kindred::fleet {

enum class Dialect { kOpenAi, kKindred };

std::string_view to_string(Dialect dialect);

struct Description {
  Dialect dialect = Dialect::kOpenAi;
  std::vector<std::string> models;    // ids, at least one
  uint64_t max_model_len_tokens = 0;  // 0: not said

  // Of kindred workers only, which serve exactly one model.
  Role role = Role::kBoth;
  std::string fingerprint;
  expert::ExpertShape shape;  // no cells for a model without experts
  std::string paced;          // the profile whose times its steps are padded to; empty: its own times

  bool serves(std::string_view model) const;
  bool operator==(const Description&) const = default;
};

// Untrusted input. A server whose models carry no `kindred` object is a plain OpenAI-compatible one.
// Error: kCorrupt, naming what is wrong.
Result<Description> parse_models(std::string_view json);

}  // namespace kindred::fleet
