#include "fleet/dialect.h"

#include <fmt/format.h>

#include <array>
#include <charconv>

#include "base/json.h"

namespace kindred::fleet {
namespace {

constexpr std::array<std::string_view, kDialects> kNames = {"openai", "kindred", "vllm", "sglang", "llama-server"};
constexpr size_t kMaxVersionBytes = 128;
constexpr uint16_t kSglangBootstrapPort = 8998;  // its default

std::string text_of(const Json& root, const char* name) {
  const auto found = root.find(name);
  if (found == root.end() || !found->is_string()) return {};
  const auto& text = found->get_ref<const std::string&>();
  const bool printable = std::ranges::all_of(text, [](char c) { return c > ' ' && c <= '~'; });
  return printable && text.size() <= kMaxVersionBytes ? text : std::string();
}

}  // namespace

std::string_view to_string(Dialect dialect) { return kNames.at(static_cast<size_t>(dialect)); }

std::optional<Dialect> parse_dialect(std::string_view name) {
  for (size_t i = 0; i < kNames.size(); ++i) {
    if (kNames.at(i) == name) return static_cast<Dialect>(i);
  }
  return std::nullopt;
}

Dialect dialect_of_owner(std::string_view owned_by) {
  if (owned_by == "vllm") return Dialect::kVllm;
  if (owned_by == "sglang") return Dialect::kSglang;
  if (owned_by == "llamacpp") return Dialect::kLlamaServer;
  return Dialect::kOpenAi;
}

std::string_view server_info_path(Dialect dialect) {
  switch (dialect) {
    case Dialect::kVllm: return "/version";
    case Dialect::kSglang: return "/get_server_info";
    case Dialect::kLlamaServer: return "/props";
    case Dialect::kOpenAi:
    case Dialect::kKindred: break;
  }
  return {};
}

std::string_view sglang_rank_field(std::string_view version) {
  constexpr std::array<uint32_t, 3> kRenamedIn = {0, 5, 10};
  std::array<uint32_t, 3> numbers{};
  for (uint32_t& number : numbers) {
    const auto [end, error] = std::from_chars(version.data(), version.data() + version.size(), number);
    if (error != std::errc{}) return "routed_dp_rank";
    version.remove_prefix(static_cast<size_t>(end - version.data()));
    if (version.starts_with('.')) version.remove_prefix(1);
  }
  return numbers < kRenamedIn ? "data_parallel_rank" : "routed_dp_rank";
}

ServerInfo parse_server_info(std::string_view json) {
  ServerInfo out;
  const Json root = parse_json(json);
  if (!root.is_object()) return out;
  out.version = text_of(root, "version");
  if (root.contains("disaggregation_mode")) {
    out.dialect = Dialect::kSglang;
    const std::string mode = text_of(root, "disaggregation_mode");
    if (mode == "prefill") out.role = Role::kPrefill;
    else if (mode == "decode") out.role = Role::kDecode;
    else out.role = Role::kBoth;
    const auto port = root.find("disaggregation_bootstrap_port");
    const bool valid = port != root.end() && port->is_number_unsigned() && port->get<uint64_t>() <= UINT16_MAX;
    out.bootstrap_port = valid ? port->get<uint16_t>() : kSglangBootstrapPort;
  } else if (root.contains("default_generation_settings")) {
    out.dialect = Dialect::kLlamaServer;
    out.version = text_of(root, "build_info");
  } else if (!out.version.empty() && root.size() == 1) {
    out.dialect = Dialect::kVllm;
  }
  return out;
}

std::string pairing_fingerprint(Dialect dialect, std::string_view model, uint64_t max_model_len_tokens,
                                std::string_view version) {
  size_t end = version.find('.');
  if (end != std::string_view::npos) end = version.find_first_not_of("0123456789", end + 1);
  return fmt::format("{}:{}:{}:{}", to_string(dialect), version.substr(0, end), max_model_len_tokens, model);
}

}  // namespace kindred::fleet
