#include "engine/quantize.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <llama.h>

#include <array>
#include <cstdio>
#include <exception>
#include <filesystem>

#include "engine/gguf_file.h"
#include "engine/llama_backend.h"

namespace kindred::engine {
namespace {

struct Quantisation {
  const char* name;
  llama_ftype type;
};

constexpr auto kQuantisations = std::to_array<Quantisation>({
    {"f32", LLAMA_FTYPE_ALL_F32},
    {"f16", LLAMA_FTYPE_MOSTLY_F16},
    {"bf16", LLAMA_FTYPE_MOSTLY_BF16},
    {"q8_0", LLAMA_FTYPE_MOSTLY_Q8_0},
    {"q6_k", LLAMA_FTYPE_MOSTLY_Q6_K},
    {"q5_k_m", LLAMA_FTYPE_MOSTLY_Q5_K_M},
    {"q4_k_m", LLAMA_FTYPE_MOSTLY_Q4_K_M},
    {"q4_0", LLAMA_FTYPE_MOSTLY_Q4_0},
});

}  // namespace

std::vector<std::string> quantisation_names() {
  std::vector<std::string> names;
  names.reserve(kQuantisations.size());
  for (const Quantisation& each : kQuantisations) names.emplace_back(each.name);
  return names;
}

Status quantize_gguf(const std::string& from, const std::string& to, const QuantizeOptions& options) {
  const Quantisation* wanted = nullptr;
  for (const Quantisation& each : kQuantisations) {
    if (options.type == each.name) wanted = &each;
  }
  if (wanted == nullptr) {
    return invalid(fmt::format("unknown type '{}'; accepted: {}", options.type, fmt::join(quantisation_names(), ", ")),
                   "type");
  }
  std::array<llama_model_kv_override, 2> overrides{};  // ends with an empty key
  if (options.name.size() >= sizeof(overrides[0].val_str)) return invalid("the name is longer than 127 bytes", "name");
  if (auto summary = inspect_gguf(from); !summary) return std::move(summary).error();

  llama_model_quantize_params params = llama_model_quantize_default_params();
  params.ftype = wanted->type;
  params.nthread = static_cast<int32_t>(options.threads);
  if (!options.name.empty()) {
    overrides[0].tag = LLAMA_KV_OVERRIDE_TYPE_STR;
    std::snprintf(overrides[0].key, sizeof(overrides[0].key), "general.name");
    std::snprintf(overrides[0].val_str, sizeof(overrides[0].val_str), "%s", options.name.c_str());
    params.kv_overrides = overrides.data();
  }
  const std::string unfinished = to + ".tmp";
  std::error_code error;
  const LlamaErrors errors;
  uint32_t failed = 1;
  std::string reason;
  try {
    failed = llama_model_quantize(from.c_str(), unfinished.c_str(), &params);
  } catch (const std::exception& e) {
    reason = e.what();
  }
  if (failed != 0) {
    if (reason.empty()) reason = errors.text();
    std::filesystem::remove(unfinished, error);
    return Error{ErrorCode::kInternal, fmt::format("{}: cannot be quantised to {}: {}", from, options.type, reason)};
  }
  std::filesystem::rename(unfinished, to, error);
  if (error) return Error{ErrorCode::kIo, fmt::format("{}: {}", to, error.message())};
  return {};
}

}  // namespace kindred::engine
