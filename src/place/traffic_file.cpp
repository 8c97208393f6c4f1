#include "place/traffic_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <map>

#include "base/config.h"
#include "base/json.h"
#include "place/json_numbers.h"
#include "place/placement_file.h"

namespace kindred::place {
namespace {

Result<TrafficFile> checked(TrafficFile file) {
  if (Status good = file.traffic.check(); !good) return std::move(good).error();
  return file;
}

// Optional fields of our own form.
Status read_setup(const Json& json, TrafficFile& file) {
  if (json.contains("ranks")) {
    const Json& ranks = json["ranks"];
    if (!ranks.is_number_unsigned() || ranks.get<uint64_t>() > 4096 || ranks.get<uint64_t>() == 0) {
      return invalid("accepted: 1 to 4096", "ranks");
    }
    file.ranks = ranks;
  }
  if (json.contains("source_names")) {
    const Json& names = json["source_names"];
    const bool strings =
        names.is_array() && std::all_of(names.begin(), names.end(), [](const Json& n) { return n.is_string(); });
    if (!strings || names.size() != file.traffic.sources) {
      return invalid(fmt::format("accepted: a list of {} strings", file.traffic.sources), "source_names");
    }
    file.source_names = names.get<std::vector<std::string>>();
  }
  if (json.contains("distance")) {
    Result<NumberGrid> grid = read_numbers(json["distance"], 2, "distance");
    if (!grid) return std::move(grid).error();
    if (grid->shape[0] != file.traffic.sources) {
      return invalid(fmt::format("{} rows; accepted: one for each of {} sources", grid->shape[0], file.traffic.sources),
                     "distance");
    }
    if (file.ranks == 0) file.ranks = static_cast<uint32_t>(grid->shape[1]);
    file.distance = std::move(grid->values);
  }
  if (json.contains("transitions") && file.traffic.layers > 1) {
    const Result<NumberGrid> grid = read_numbers(json["transitions"], 3, "transitions");
    if (!grid) return grid.error();
    file.transitions.assign(grid->values.begin(), grid->values.end());
  }
  return {};
}

Result<TrafficFile> own_json(const Json& json) {
  Result<NumberGrid> grid = read_numbers(json["A"], 3, "A");
  if (!grid) return std::move(grid).error();
  TrafficFile file;
  file.traffic = {.layers = static_cast<uint32_t>(grid->shape[0]),
                  .sources = static_cast<uint32_t>(grid->shape[1]),
                  .experts = static_cast<uint32_t>(grid->shape[2]),
                  .tokens = std::move(grid->values)};
  if (Status good = read_setup(json, file); !good) return std::move(good).error();
  if (json.contains("placement")) {
    Result<Placement> old = placement_from_lists(json["placement"], file.traffic.experts, file.ranks);
    if (!old) return std::move(old).error();
    file.old = *std::move(old);
  }
  return checked(std::move(file));
}

// Loads of physical experts, summed over windows if there are several, and then over the slots of an expert.
Result<TrafficFile> vllm_json(const Json& json) {
  const Result<NumberGrid> map = read_numbers(json["physical_to_logical_map"], 2, "physical_to_logical_map");
  if (!map) return map.error();
  const bool windows = json.contains("expert_load") && depth(json["expert_load"]) == 3;
  const Result<NumberGrid> load =
      read_numbers(json.contains("expert_load") ? json["expert_load"] : Json(), windows ? 3 : 2, "expert_load");
  if (!load) return load.error();
  const size_t layers = map->shape[0], slots = map->shape[1];
  if (load->shape[windows ? 1 : 0] != layers || load->shape[windows ? 2 : 1] != slots) {
    return invalid(
        fmt::format("accepted: the shape of physical_to_logical_map, {} x {}, or windows of it", layers, slots),
        "expert_load");
  }
  Result<std::vector<std::vector<uint32_t>>> experts = slots_from_numbers(*map);
  if (!experts) return std::move(experts).error();
  uint32_t most = 0;
  for (const auto& row : *experts) most = std::max(most, *std::max_element(row.begin(), row.end()));
  TrafficFile file;
  file.traffic = {.layers = static_cast<uint32_t>(layers), .sources = 1, .experts = most + 1};
  file.traffic.tokens.assign(layers * file.traffic.experts, 0.0);
  for (size_t i = 0; i < load->values.size(); ++i) {
    const size_t layer = i / slots % layers;
    file.traffic.tokens[layer * file.traffic.experts + (*experts)[layer][i % slots]] += load->values[i];
  }
  file.slots = *std::move(experts);
  return checked(std::move(file));
}

// ------------------------------------------------------------------------------------------------- CSV

struct CsvCell {
  uint32_t layer, source, expert;
  double tokens;
};

template <class T>
bool parse_number(std::string_view text, T& out) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\r')) text.remove_suffix(1);
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  return error == std::errc() && end == text.data() + text.size();
}

bool parse_cell(std::string_view line, CsvCell& cell) {
  std::array<std::string_view, 4> field;
  for (size_t i = 0; i < 4; ++i) {
    const size_t comma = line.find(',');
    if ((comma == std::string_view::npos) != (i == 3)) return false;
    field[i] = line.substr(0, comma);
    line.remove_prefix(i == 3 ? line.size() : comma + 1);
  }
  return parse_number(field[0], cell.layer) && parse_number(field[1], cell.source) &&
         parse_number(field[2], cell.expert) && parse_number(field[3], cell.tokens);
}

Result<std::vector<CsvCell>> parse_csv(std::string_view text) {
  std::vector<CsvCell> cells;
  for (size_t number = 1; !text.empty(); ++number) {
    const size_t end = text.find('\n');
    std::string_view line = text.substr(0, end);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
    if (number == 1) {
      if (line != "layer,source,expert,tokens") {
        return invalid("line 1: accepted: the header layer,source,expert,tokens", "csv");
      }
      continue;
    }
    if (line.empty()) continue;
    CsvCell cell{};
    if (!parse_cell(line, cell)) {
      return invalid(fmt::format("line {}: accepted: layer, source and expert from 0, and tokens", number), "csv");
    }
    cells.push_back(cell);
  }
  return cells;
}

}  // namespace

Result<TrafficFile> traffic_from_json(std::string_view text) {
  const Json json = parse_json(text);
  if (json.is_object() && json.contains("A")) return own_json(json);
  if (json.is_object() && json.contains("physical_to_logical_map")) return vllm_json(json);
  return invalid(
      "accepted: a JSON object with \"A\" [layers][sources][experts], or with "
      "\"physical_to_logical_map\" and \"expert_load\"",
      "json");
}

Result<TrafficFile> traffic_from_csv(std::string_view text) {
  const Result<std::vector<CsvCell>> cells = parse_csv(text);
  if (!cells) return cells.error();
  uint64_t layers = 0, sources = 0, experts = 0;
  for (const CsvCell& cell : *cells) {
    layers = std::max<uint64_t>(layers, uint64_t{cell.layer} + 1);
    sources = std::max<uint64_t>(sources, uint64_t{cell.source} + 1);
    experts = std::max<uint64_t>(experts, uint64_t{cell.expert} + 1);
  }
  constexpr uint64_t kMostCells = 1ULL << 26;
  if (layers > 1024 || sources > 4096 || experts > 65'536 || layers * sources * experts > kMostCells) {
    return invalid(fmt::format("{} layers, {} sources, {} experts; accepted: at most 1024, 4096, 65536, and {} cells",
                               layers, sources, experts, kMostCells),
                   "csv");
  }
  TrafficFile file;
  file.traffic = {.layers = static_cast<uint32_t>(layers),
                  .sources = static_cast<uint32_t>(sources),
                  .experts = static_cast<uint32_t>(experts),
                  .tokens = std::vector<double>(layers * sources * experts, 0.0)};
  for (const CsvCell& cell : *cells) {
    file.traffic.tokens[(cell.layer * sources + cell.source) * experts + cell.expert] += cell.tokens;
  }
  return checked(std::move(file));
}

Result<TrafficFile> traffic_from_activations(const expert::Activations& activations, uint32_t sources) {
  const size_t layers = activations.shape.layers.size(), experts = activations.shape.experts;
  std::map<std::string, uint32_t> domain;  // in alphabetical order
  for (const std::string& name : activations.domains) domain.emplace(name, 0);
  uint32_t index = 0;
  for (auto& [name, number] : domain) number = index++;
  TrafficFile file;
  const uint32_t count = sources > 0 ? sources : std::max<uint32_t>(1, index);
  if (count > 4096) return invalid(fmt::format("{} domains; accepted: at most 4096, or --sources", count), "sources");
  file.traffic = {.layers = static_cast<uint32_t>(layers),
                  .sources = count,
                  .experts = static_cast<uint32_t>(experts),
                  .tokens = std::vector<double>(layers * count * experts, 0.0)};
  file.source_names.resize(count);
  for (const auto& [name, number] : domain) {
    std::string& label = file.source_names[number % count];
    label += (label.empty() ? "" : " + ") + name;
  }
  if (domain.empty()) file.source_names.clear();
  file.transitions.assign((layers - std::min<size_t>(layers, 1)) * experts * experts, 0.0F);
  for (size_t i = 0; i < activations.requests(); ++i) {
    const bool decode = activations.has_decode() && activations.decode_tokens[i] > 0;
    const std::span<const uint32_t> counts = decode ? activations.decode(i) : activations.prefill(i);
    const auto s =
        activations.has_domains() ? domain.at(activations.domains[i]) % count : static_cast<uint32_t>(i % count);
    for (size_t l = 0; l < layers; ++l) {
      for (size_t e = 0; e < experts; ++e) {
        const uint32_t now = counts[l * experts + e];
        if (now == 0) continue;
        file.traffic.tokens[(l * count + s) * experts + e] += now;
        if (l + 1 == layers) continue;
        const double share = static_cast<double>(now) / (static_cast<double>(decode ? activations.decode_tokens[i]
                                                                                    : activations.prompt_tokens[i]) *
                                                         activations.shape.top_k);
        float* to = file.transitions.data() + (l * experts + e) * experts;
        for (size_t f = 0; f < experts; ++f) to[f] += static_cast<float>(share * counts[(l + 1) * experts + f]);
      }
    }
  }
  return checked(std::move(file));
}

Result<TrafficFile> load_traffic(const std::string& path, const TrafficFileOptions& options) {
  if (path.ends_with(".safetensors")) {
    const Result<expert::Activations> activations = expert::load_activations(path);
    if (!activations) return activations.error();
    return traffic_from_activations(*activations, options.sources);
  }
  Result<std::string> text = read_file(path);
  if (!text) return std::move(text).error();
  Result<TrafficFile> file = path.ends_with(".csv") ? traffic_from_csv(*text) : traffic_from_json(*text);
  if (!file) {
    Error error = std::move(file).error();
    error.message = path + ": " + (error.field.empty() ? "" : error.field + ": ") + error.message;
    return error;
  }
  return file;
}

}  // namespace kindred::place
