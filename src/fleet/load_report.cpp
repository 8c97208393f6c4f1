#include "fleet/load_report.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>

#include "base/json.h"

namespace kindred::fleet {
namespace {

constexpr size_t kMaxRanks = 4096;

struct Names {
  std::string_view running, waiting, usage, old_usage;
};

Names names_of(Dialect dialect) {
  switch (dialect) {
    case Dialect::kVllm:
      return {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
              "vllm:gpu_cache_usage_perc"};
    case Dialect::kSglang: return {"sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage", {}};
    case Dialect::kLlamaServer:
      return {"llamacpp:requests_processing", "llamacpp:requests_deferred", "llamacpp:kv_cache_usage_ratio", {}};
    case Dialect::kKindred:
      return {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", {}};
    case Dialect::kOpenAi: break;
  }
  return {};
}

std::optional<double> number(std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || !std::isfinite(value) || value < 0) return std::nullopt;
  return value;
}

void add(std::optional<double>& sum, double value) { sum = sum.value_or(0) + value; }
void raise(std::optional<double>& most, double value) { most = std::max(most.value_or(0), value); }

// Behind the labels, whose values may hold braces and escaped quotes.
std::string_view after_labels(std::string_view rest) {
  bool quoted = false;
  for (size_t i = 1; i < rest.size(); ++i) {
    if (quoted && rest[i] == '\\') ++i;
    else if (rest[i] == '"') quoted = !quoted;
    else if (!quoted && rest[i] == '}') return rest.substr(i + 1);
  }
  return {};
}

}  // namespace

LoadReport parse_load_metrics(Dialect dialect, std::string_view text) {
  LoadReport out;
  const Names names = names_of(dialect);
  if (names.running.empty()) return out;
  while (!text.empty()) {
    std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(text.size(), line.size() + 1));
    if (line.empty() || line.front() == '#') continue;
    const std::string_view name = line.substr(0, line.find_first_of("{ \t"));
    const bool usage = name == names.usage || (!names.old_usage.empty() && name == names.old_usage);
    if (name != names.running && name != names.waiting && !usage) continue;
    line.remove_prefix(name.size());
    if (line.starts_with('{')) line = after_labels(line);
    const size_t begin = line.find_first_not_of(" \t");
    if (begin == std::string_view::npos) continue;
    const std::optional<double> value = number(line.substr(begin));
    if (!value) continue;
    if (usage) raise(out.kv_usage, *value);
    else add(name == names.running ? out.running : out.waiting, *value);
  }
  return out;
}

LoadReport parse_sglang_loads(std::string_view json) {
  LoadReport out;
  const Json root = parse_json(json);
  // The list itself before there was an object around it.
  const Json* loads = &root;
  if (root.is_object()) {
    const auto found = root.find("loads");
    if (found == root.end()) return out;
    loads = &*found;
  }
  if (!loads->is_array() || loads->size() > kMaxRanks) return out;
  for (const Json& rank : *loads) {
    if (!rank.is_object()) return {};
    const auto get = [&](const char* name) -> std::optional<double> {
      const auto found = rank.find(name);
      if (found == rank.end() || !found->is_number()) return std::nullopt;
      const double value = found->get<double>();
      return value >= 0 && std::isfinite(value) ? std::optional(value) : std::nullopt;
    };
    const auto running = get("num_running_reqs"), waiting = get("num_waiting_reqs"), usage = get("token_usage");
    if (!running || !waiting) return {};  // half a sum would be a wrong one
    add(out.running, *running);
    add(out.waiting, *waiting);
    if (usage) raise(out.kv_usage, *usage);
  }
  return out;
}

}  // namespace kindred::fleet
