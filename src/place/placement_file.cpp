#include "place/placement_file.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "base/config.h"

namespace kindred::place {
namespace {

bool is_rank(const Json& value, uint32_t ranks) {
  return value.is_number_unsigned() && value.get<uint64_t>() < (ranks > 0 ? ranks : 4096);
}

Status read_expert(const Json& entry, uint32_t layer, uint32_t expert, uint32_t ranks, Placement& out) {
  const auto bad = [&] {
    return invalid(fmt::format("layer {}, expert {}: accepted: a rank below {}, or a list of such", layer, expert,
                               ranks > 0 ? ranks : 4096),
                   "placement");
  };
  if (is_rank(entry, ranks)) {
    out.rank.push_back(entry);
    return {};
  }
  if (!entry.is_array() || entry.empty()) return bad();
  for (size_t i = 0; i < entry.size(); ++i) {
    if (!is_rank(entry[i], ranks)) return bad();
    if (i == 0) out.rank.push_back(entry[i]);
    else out.copies.push_back({.layer = layer, .expert = expert, .rank = entry[i]});
  }
  return {};
}

uint32_t slots_per_rank(const Placement& placement) {
  return static_cast<uint32_t>((placement.experts + placement.layer_copies(0).size()) / placement.ranks);
}

// `held`: the experts of one rank of one layer. Those that were there keep their slots.
std::vector<uint32_t> fill_slots(std::vector<uint32_t> held, std::span<const uint32_t> old) {
  constexpr uint32_t kFree = UINT32_MAX;
  std::vector<uint32_t> slots(held.size(), kFree);
  for (size_t i = 0; i < std::min(old.size(), slots.size()); ++i) {
    const auto found = std::find(held.begin(), held.end(), old[i]);
    if (found == held.end()) continue;
    slots[i] = old[i];
    held.erase(found);
  }
  size_t next = 0;
  for (uint32_t& slot : slots) {
    if (slot == kFree) slot = held[next++];
  }
  return slots;
}

}  // namespace

Json placement_json(const Placement& placement) {
  Json layers = Json::array();
  for (uint32_t l = 0; l < placement.layers; ++l) {
    Json row = Json::array();
    for (const uint32_t rank : placement.layer(l)) row.push_back(rank);
    for (const Copy& copy : placement.layer_copies(l)) {
      Json& entry = row[copy.expert];
      if (!entry.is_array()) entry = Json::array({entry});
      entry.push_back(copy.rank);
    }
    layers.push_back(std::move(row));
  }
  return {{"layers", placement.layers},
          {"experts", placement.experts},
          {"ranks", placement.ranks},
          {"placement", std::move(layers)}};
}

std::string placement_to_text(const Placement& placement) {
  std::string rows;
  const Json json = placement_json(placement);
  for (const Json& row : json["placement"]) {
    rows += fmt::format("{}\n  {}", rows.empty() ? "" : ",", dump_json(row));
  }
  return fmt::format("{{\"layers\": {}, \"experts\": {}, \"ranks\": {}, \"placement\": [{}\n]}}\n", placement.layers,
                     placement.experts, placement.ranks, rows);
}

Result<Placement> placement_from_text(std::string_view text) {
  const Json json = parse_json(text);
  const auto number = [&](const char* field) -> uint32_t {
    const bool good = json.is_object() && json.contains(field) && json[field].is_number_unsigned() &&
                      json[field].get<uint64_t>() <= 65'536;
    return good ? json[field].get<uint32_t>() : 0;
  };
  const uint32_t layers = number("layers"), experts = number("experts"), ranks = number("ranks");
  if (layers == 0 || experts == 0 || ranks == 0 || ranks > 4096 || !json.contains("placement")) {
    return invalid("accepted: a JSON object with layers, experts, ranks and placement [layers][experts]", "placement");
  }
  Result<Placement> placement = placement_from_lists(json["placement"], experts, ranks);
  if (placement && placement->layers != layers) {
    return invalid(fmt::format("{} layers where {} are said to be", placement->layers, layers), "placement");
  }
  return placement;
}

Result<Placement> load_placement(const std::string& path) {
  const Result<std::string> text = read_file(path);
  if (!text) return text.error();
  Result<Placement> placement = placement_from_text(*text);
  if (placement) return placement;
  Error error = std::move(placement).error();
  error.message = path + ": " + error.message;
  return error;
}

Result<Placement> placement_from_lists(const Json& lists, uint32_t experts, uint32_t ranks) {
  if (!lists.is_array() || lists.empty() || lists.size() > 1024) {
    return invalid("accepted: a list per layer, of a rank per expert", "placement");
  }
  Placement placement{.layers = static_cast<uint32_t>(lists.size()), .experts = experts, .ranks = ranks};
  for (uint32_t l = 0; l < placement.layers; ++l) {
    if (!lists[l].is_array() || lists[l].size() != experts) {
      return invalid(
          fmt::format("layer {}: {} entries; accepted: one for each of {} experts", l, lists[l].size(), experts),
          "placement");
    }
    for (uint32_t e = 0; e < experts; ++e) {
      if (Status good = read_expert(lists[l][e], l, e, ranks, placement); !good) return std::move(good).error();
    }
  }
  if (placement.ranks == 0) {
    placement.ranks = 1 + *std::max_element(placement.rank.begin(), placement.rank.end());
    for (const Copy& copy : placement.copies) placement.ranks = std::max(placement.ranks, copy.rank + 1);
  }
  std::sort(placement.copies.begin(), placement.copies.end());
  return placement;
}

std::vector<std::vector<uint32_t>> slots_of(const Placement& placement, const std::vector<std::vector<uint32_t>>& old) {
  const uint32_t slots = slots_per_rank(placement);
  std::vector<std::vector<uint32_t>> out(placement.layers);
  for (uint32_t l = 0; l < placement.layers; ++l) {
    std::vector<std::vector<uint32_t>> held(placement.ranks);
    for (uint32_t e = 0; e < placement.experts; ++e) held[placement.layer(l)[e]].push_back(e);
    for (const Copy& copy : placement.layer_copies(l)) held[copy.rank].push_back(copy.expert);
    for (uint32_t r = 0; r < placement.ranks; ++r) {
      std::sort(held[r].begin(), held[r].end());
      std::span<const uint32_t> before;
      if (l < old.size() && old[l].size() == size_t{slots} * placement.ranks) {
        before = {old[l].data() + size_t{r} * slots, slots};
      }
      const std::vector<uint32_t> filled = fill_slots(std::move(held[r]), before);
      out[l].insert(out[l].end(), filled.begin(), filled.end());
    }
  }
  return out;
}

Result<Placement> placement_from_slots(const std::vector<std::vector<uint32_t>>& slots, uint32_t experts,
                                       uint32_t ranks) {
  Placement placement{.layers = static_cast<uint32_t>(slots.size()), .experts = experts, .ranks = ranks};
  for (uint32_t l = 0; l < placement.layers; ++l) {
    if (ranks == 0 || slots[l].size() % ranks != 0) {
      return invalid(fmt::format("layer {}: {} slots do not divide among {} ranks", l, slots[l].size(), ranks),
                     "physical_to_logical_map");
    }
    const size_t per_rank = slots[l].size() / ranks;
    std::vector<uint32_t> rank(experts, ranks);
    for (size_t slot = 0; slot < slots[l].size(); ++slot) {
      const uint32_t e = slots[l][slot], r = static_cast<uint32_t>(slot / per_rank);
      if (e >= experts) {
        return invalid(fmt::format("layer {}, slot {}: there is no expert {} of {}", l, slot, e, experts),
                       "physical_to_logical_map");
      }
      if (rank[e] == ranks) rank[e] = r;
      else placement.copies.push_back({.layer = l, .expert = e, .rank = r});
    }
    const auto missing = std::find(rank.begin(), rank.end(), ranks);
    if (missing != rank.end()) {
      return invalid(fmt::format("layer {}: expert {} has no slot", l, missing - rank.begin()),
                     "physical_to_logical_map");
    }
    placement.rank.insert(placement.rank.end(), rank.begin(), rank.end());
  }
  std::sort(placement.copies.begin(), placement.copies.end());
  return placement;
}

std::string vllm_map(const std::vector<std::vector<uint32_t>>& slots) {
  std::string rows;
  for (const std::vector<uint32_t>& row : slots) {
    rows += fmt::format("{}\n  [{}]", rows.empty() ? "" : ",", fmt::join(row, ", "));
  }
  return fmt::format("[{}\n]\n", rows);
}

std::string sglang_location(const std::vector<std::vector<uint32_t>>& slots) {
  return fmt::format("{{\"physical_to_logical_map\": {}}}\n", vllm_map(slots));
}

}  // namespace kindred::place
