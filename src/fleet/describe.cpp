#include "fleet/describe.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "base/json.h"
#include "fleet/engine_trace.h"

namespace kindred::fleet {
namespace {

// Bounds on what one worker may make the router remember.
constexpr size_t kMaxModels = 4096;
constexpr size_t kMaxNameBytes = 1024;
constexpr size_t kMaxLayers = 4096;
constexpr uint64_t kMaxExperts = 65536;

Error corrupt(std::string what) { return Error{ErrorCode::kCorrupt, "GET /v1/models: " + std::move(what)}; }

const Json* member(const Json& object, const char* name) {
  const auto it = object.find(name);
  return it == object.end() || it->is_null() ? nullptr : &*it;
}

std::optional<std::string> text_member(const Json& object, const char* name) {
  const Json* found = member(object, name);
  if (found == nullptr || !found->is_string()) return std::nullopt;
  const auto& text = found->get_ref<const std::string&>();
  if (text.empty() || text.size() > kMaxNameBytes) return std::nullopt;
  // Names end up in logs and on terminals.
  if (std::any_of(text.begin(), text.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; })) return std::nullopt;
  return text;
}

std::optional<uint64_t> number_member(const Json& object, const char* name, uint64_t most) {
  const Json* found = member(object, name);
  if (found == nullptr || !found->is_number_unsigned()) return std::nullopt;
  const auto number = found->get<uint64_t>();
  if (number > most) return std::nullopt;
  return number;
}

Status read_kindred(const Json& kindred, Description& out) {
  if (!kindred.is_object()) return corrupt("'kindred' is not an object");
  if (number_member(kindred, "v", 1) != 1) return corrupt("'kindred.v' is not 1");
  const auto role = parse_role(text_member(kindred, "role").value_or(""));
  if (!role) return corrupt("'kindred.role' is none of prefill, decode, both");
  const auto fingerprint = text_member(kindred, "fingerprint");
  if (!fingerprint) return corrupt("'kindred.fingerprint' is missing");
  const auto experts = number_member(kindred, "experts", kMaxExperts);
  const auto top_k = number_member(kindred, "top_k", kMaxExperts);
  const Json* layers = member(kindred, "layers");
  if (!experts || !top_k || layers == nullptr || !layers->is_array() || layers->size() > kMaxLayers) {
    return corrupt("'kindred' lacks a valid layers, experts or top_k");
  }
  for (const Json& layer : *layers) {
    if (!layer.is_number_unsigned() || layer.get<uint64_t>() > kMaxLayers) return corrupt("'kindred.layers' is wrong");
    out.shape.layers.push_back(layer.get<uint32_t>());
  }
  if (!std::is_sorted(out.shape.layers.begin(), out.shape.layers.end())) {
    return corrupt("'kindred.layers' is not ascending");
  }
  out.shape.experts = static_cast<uint32_t>(*experts);
  out.shape.top_k = static_cast<uint32_t>(*top_k);
  out.dialect = Dialect::kKindred;
  out.role = *role;
  out.fingerprint = *fingerprint;
  out.paced = text_member(kindred, "paced").value_or("");
  const auto engines = member(kindred, "data_parallel_size") == nullptr
                           ? std::optional<uint64_t>(1)
                           : number_member(kindred, "data_parallel_size", kMostEngines);
  if (!engines || *engines == 0) {
    return corrupt(fmt::format("'kindred.data_parallel_size' is none of 1 to {}", kMostEngines));
  }
  out.engines = static_cast<uint32_t>(*engines);
  out.traces = text_member(kindred, "traces").value_or("");
  return {};
}

}  // namespace

bool Description::serves(std::string_view model) const {
  return std::find(models.begin(), models.end(), model) != models.end();
}

Result<Description> parse_models(std::string_view text) {
  const Json root = parse_json(text);
  if (!root.is_object()) return corrupt("not a JSON object");
  const Json* data = member(root, "data");
  if (data == nullptr || !data->is_array() || data->empty() || data->size() > kMaxModels) {
    return corrupt("'data' is not a list of models");
  }
  Description out;
  if (data->front().is_object()) out.owner = text_member(data->front(), "owned_by").value_or("");
  out.dialect = dialect_of_owner(out.owner);
  for (const Json& model : *data) {
    if (!model.is_object()) return corrupt("a model is not an object");
    auto id = text_member(model, "id");
    if (!id) return corrupt("a model has no id");
    if (auto parent = text_member(model, "parent")) out.adapters.emplace_back(*id, *std::move(parent));
    out.models.push_back(*std::move(id));
    const Json* kindred = member(model, "kindred");
    if (kindred == nullptr) continue;
    if (data->size() != 1) return corrupt("a kindred worker serves one model");
    if (Status read = read_kindred(*kindred, out); !read) return std::move(read).error();
  }
  out.max_model_len_tokens = number_member(data->front(), "max_model_len", 1ULL << 40).value_or(0);
  return out;
}

void complete(Description& description, const ServerInfo& info, std::optional<Dialect> configured) {
  if (configured) description.dialect = *configured;
  else if (info.dialect && description.dialect == Dialect::kOpenAi) description.dialect = *info.dialect;
  description.version = info.version;
  if (description.dialect != Dialect::kVllm && description.dialect != Dialect::kSglang) return;
  description.role = info.role.value_or(Role::kBoth);
  description.bootstrap_port = info.bootstrap_port;
  description.fingerprint = pairing_fingerprint(description.dialect, description.models.front(),
                                                description.max_model_len_tokens, description.version);
}

}  // namespace kindred::fleet
