#include "fleet/load_report.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>

#include "base/json.h"
#include "fleet/engine_trace.h"

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

// The data-parallel engine that a line is about, by the label that the dialects give it; 0 without one.
std::optional<uint32_t> rank_of(std::string_view labels) {
  for (const std::string_view label : {std::string_view("engine=\""), std::string_view("dp_rank=\"")}) {
    for (size_t at = labels.find(label); at != std::string_view::npos; at = labels.find(label, at + 1)) {
      if (at == 0 || (labels[at - 1] != '{' && labels[at - 1] != ',' && labels[at - 1] != ' ')) continue;
      const std::string_view text = labels.substr(at + label.size());
      uint32_t rank = 0;
      const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), rank);
      if (error != std::errc{} || end == text.data() + text.size() || *end != '"' || rank >= kMostEngines) {
        return std::nullopt;
      }
      return rank;
    }
  }
  return 0;
}

// One engine's figures, as they are found line by line.
struct Found {
  std::optional<double> running, waiting, usage;
};

// All of them, or none: a list with a hole would say that an engine is gone.
std::vector<EngineLoad> whole(const std::vector<Found>& found) {
  std::vector<EngineLoad> out;
  for (const Found& one : found) {
    if (!one.running || !one.waiting) return {};
    out.push_back({.rank = static_cast<uint32_t>(out.size()),
                   .running = *one.running,
                   .waiting = *one.waiting,
                   .kv_usage = std::min(one.usage.value_or(0), 1.0)});
  }
  return out;
}

// A member that is a finite number and not negative.
std::optional<double> figure(const Json& object, const char* name) {
  const auto found = object.find(name);
  if (found == object.end() || !found->is_number()) return std::nullopt;
  const auto value = found->get<double>();
  return value >= 0 && std::isfinite(value) ? std::optional(value) : std::nullopt;
}

// Prefill tokens of one rank, where it tells them.
void read_prefill_tokens(const Json& rank, EngineLoad& out) {
  const auto told = rank.find("kindred");
  if (told != rank.end() && told->is_object()) {
    out.remaining_prefill_tokens = figure(*told, "remaining_prefill_tokens");
    out.waiting_prefill_tokens = figure(*told, "waiting_prefill_tokens");
    if (out.remaining_prefill_tokens && out.waiting_prefill_tokens) return;
  }
  const auto total = figure(rank, "num_total_tokens"), used = figure(rank, "num_used_tokens");
  // What is left of a chunked prompt is in it. Before there was such a figure: the prompts that wait.
  out.waiting_prefill_tokens = figure(rank, "num_waiting_uncached_tokens");
  if (!out.waiting_prefill_tokens && total && used) out.waiting_prefill_tokens = std::max(0.0, *total - *used);
  if (out.waiting_prefill_tokens) out.remaining_prefill_tokens = 0;
}

// By rank, each once and none left out; else none.
std::vector<EngineLoad> in_order(std::vector<EngineLoad> engines) {
  std::ranges::sort(engines, {}, &EngineLoad::rank);
  for (size_t i = 0; i < engines.size(); ++i) {
    if (engines[i].rank != i) return {};
  }
  return engines;
}

}  // namespace

LoadReport parse_load_metrics(Dialect dialect, std::string_view text) {
  LoadReport out;
  const Names names = names_of(dialect);
  if (names.running.empty()) return out;
  std::vector<Found> engines;
  while (!text.empty()) {
    std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(text.size(), line.size() + 1));
    if (line.empty() || line.front() == '#') continue;
    const std::string_view name = line.substr(0, line.find_first_of("{ \t"));
    const bool usage = name == names.usage || (!names.old_usage.empty() && name == names.old_usage);
    if (name != names.running && name != names.waiting && !usage) continue;
    line.remove_prefix(name.size());
    const std::string_view labels = line;
    if (line.starts_with('{')) line = after_labels(line);
    const size_t begin = line.find_first_not_of(" \t");
    if (begin == std::string_view::npos) continue;
    const std::optional<double> value = number(line.substr(begin));
    if (!value) continue;
    if (usage) raise(out.kv_usage, *value);
    else add(name == names.running ? out.running : out.waiting, *value);
    const std::optional<uint32_t> rank = rank_of(labels.substr(0, labels.size() - line.size()));
    if (!rank) continue;
    if (engines.size() <= *rank) engines.resize(*rank + size_t{1});
    // A server with several models has a line for each.
    if (usage) raise(engines[*rank].usage, *value);
    else add(name == names.running ? engines[*rank].running : engines[*rank].waiting, *value);
  }
  out.engines = whole(engines);
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
    const auto running = figure(rank, "num_running_reqs"), waiting = figure(rank, "num_waiting_reqs"),
               usage = figure(rank, "token_usage");
    if (!running || !waiting) return {};  // half a sum would be a wrong one
    add(out.running, *running);
    add(out.waiting, *waiting);
    if (usage) raise(out.kv_usage, *usage);
    EngineLoad engine{.rank = static_cast<uint32_t>(out.engines.size()), .running = *running, .waiting = *waiting};
    if (const auto number = figure(rank, "dp_rank"); number && *number < kMaxRanks) {
      engine.rank = static_cast<uint32_t>(*number);
    }
    engine.kv_usage = std::min(usage.value_or(0), 1.0);
    engine.kv_used_tokens = figure(rank, "num_used_tokens").value_or(0);
    engine.kv_tokens = figure(rank, "max_total_num_tokens").value_or(0);
    read_prefill_tokens(rank, engine);
    out.engines.push_back(engine);
  }
  out.engines = in_order(std::move(out.engines));
  if (out.engines.size() > kMostEngines) out.engines.clear();
  return out;
}

}  // namespace kindred::fleet
