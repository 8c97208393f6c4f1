#include "router/models.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/bytes.h"
#include "base/json.h"
#include "router/core.h"
#include "router/exchange.h"
#include "router/health.h"
#include "router/splice.h"

namespace kindred::router {
namespace {

// simdjson reads beyond the end of what it scans.
constexpr size_t kScanPadding = 64;

Error bad_alias(std::string_view entry, std::string_view why) {
  return invalid(fmt::format("model_alias: '{}': {}", entry, why), "model_alias");
}

// The request again, for another model.
std::optional<ApiError> rename(Exchange& exchange, const std::string& model) {
  const std::string value = json_string(model);
  Result<std::string> body = splice(exchange.request.body, {{"model", value}});
  if (!body) return api_error(body.error());
  body->reserve(body->size() + kScanPadding);
  exchange.request.body = *std::move(body);
  // What was found in the old bytes points into them.
  Result<RequestScan> scan = scan_request(exchange.request.body, exchange.request.body.capacity());
  if (!scan) return api_error(scan.error());
  exchange.scan = *std::move(scan);
  exchange.model = model;
  return std::nullopt;
}

}  // namespace

Result<ModelAliases> ModelAliases::parse(const std::vector<std::string>& entries) {
  ModelAliases out;
  if (entries.size() > kMaxAliases) {
    return invalid(fmt::format("model_alias: {} given; at most {}", entries.size(), kMaxAliases), "model_alias");
  }
  for (const std::string& entry : entries) {
    const size_t equals = entry.find('=');
    if (equals == std::string::npos || equals == 0 || equals + 1 == entry.size()) {
      return bad_alias(entry, "accepted: ALIAS=MODEL");
    }
    std::string alias = entry.substr(0, equals);
    if (out.find(alias) != nullptr) return bad_alias(entry, "the alias is given twice");
    out.entries_.emplace_back(std::move(alias), entry.substr(equals + 1));
  }
  for (const auto& [alias, model] : out.entries_) {
    if (out.find(model) != nullptr)
      return bad_alias(fmt::format("{}={}", alias, model), "its model is an alias itself");
  }
  return out;
}

const std::string* ModelAliases::find(std::string_view name) const {
  const auto at = std::ranges::find_if(entries_, [&](const auto& entry) { return entry.first == name; });
  return at == entries_.end() ? nullptr : &at->second;
}

std::string resolve_model(const Core& core, std::string_view name) {
  const SettingsPtr settings = core.settings();
  if (settings->aliases.entries().empty() || core.fleet.serving(name).known) return std::string(name);
  const std::string* model = settings->aliases.find(name);
  return model == nullptr ? std::string(name) : *model;
}

std::optional<ApiError> name_model(Core& core, Exchange& exchange) {
  if (exchange.scan.model) exchange.model = *exchange.scan.model;
  if (exchange.model.empty()) {
    std::vector<fleet::ServedModel> models = core.fleet.models();
    std::erase_if(models, [](const fleet::ServedModel& model) { return !model.parent.empty(); });
    if (models.size() == 1) exchange.model = models.front().id;
  }
  if (!exchange.model.empty()) {
    if (core.fleet.serving(exchange.model).known) return std::nullopt;
    const std::string* behind = exchange.settings->aliases.find(exchange.model);
    if (behind != nullptr && core.fleet.serving(*behind).known) return rename(exchange, *behind);
  }
  if (core.fleet.models().empty()) return no_worker(unserved_reason(core, {}));
  return model_not_found(exchange.model, served_models_text(core));
}

std::string models_json(const Core& core) {
  const SettingsPtr settings = core.settings();
  Json data = Json::array();
  const auto entry = [](const std::string& id) {
    return Json{{"id", id}, {"object", "model"}, {"created", 0}, {"owned_by", "kindred"}};
  };
  for (const fleet::ServedModel& model : core.fleet.models()) {
    data.push_back(entry(model.id));
    if (!model.parent.empty()) data.back()["parent"] = model.parent;
    if (model.max_model_len_tokens > 0) data.back()["max_model_len"] = model.max_model_len_tokens;
  }
  for (const auto& [alias, model] : settings->aliases.entries()) {
    if (core.fleet.serving(alias).known || !core.fleet.serving(model).known) continue;
    data.push_back(entry(alias));
    data.back()["root"] = model;
  }
  return dump_json({{"object", "list"}, {"data", std::move(data)}}) + "\n";
}

std::string served_models_text(const Core& core) {
  const SettingsPtr settings = core.settings();
  std::string out;
  for (const fleet::ServedModel& model : core.fleet.models()) out += (out.empty() ? "" : ", ") + model.id;
  for (const auto& [alias, model] : settings->aliases.entries()) {
    if (core.fleet.serving(alias).known || !core.fleet.serving(model).known) continue;
    out += fmt::format(", {} (alias of {})", alias, model);
  }
  return out.empty() ? "none yet" : out;
}

}  // namespace kindred::router
