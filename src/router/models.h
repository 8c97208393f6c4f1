// Which model a request is for: by name, by an alias of the operator's, or by a LoRA adapter's name, which its
// workers list among their models.
//
// Thread-safety: ModelAliases is a plain value; the rest may be called on any thread.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.h"
#include "router/errors.h"

namespace kindred::router {

class Core;
class Exchange;

class ModelAliases {
 public:
  // "alias=model" each, at most kMaxAliases. Error: kInvalid: no such form, an alias given twice, or one that
  // leads to another.
  static Result<ModelAliases> parse(const std::vector<std::string>& entries);

  // The model behind an alias; null: it is none.
  const std::string* find(std::string_view name) const;
  const std::vector<std::pair<std::string, std::string>>& entries() const { return entries_; }

 private:
  std::vector<std::pair<std::string, std::string>> entries_;  // few: looked through
};
inline constexpr size_t kMaxAliases = 256;

// Sets exchange.model, from a request that has been scanned. A name that no worker knows and that is an alias
// becomes its model, in the body too. Without a name, the only base model there is. Else the error that says what
// is served.
std::optional<ApiError> name_model(Core& core, Exchange& exchange);

// The name of the model behind `name`, which may be an alias that no worker knows.
std::string resolve_model(const Core& core, std::string_view name);

// GET /v1/models: an OpenAI list of every model that some worker has named, adapters with their `parent`, and of
// the aliases, with their model as `root`.
std::string models_json(const Core& core);

// "a, b", or "none yet".
std::string served_models_text(const Core& core);

}  // namespace kindred::router
