#include "engine/expert_placement.h"

#include <fmt/format.h>

#include <fstream>
#include <iterator>

#include "base/json.h"

namespace kindred::engine {
namespace {

Status check_number(const Json& document, const char* field, uint32_t wanted, const char* of_what) {
  const auto found = document.find(field);
  if (found == document.end()) return invalid(fmt::format("{} is missing; accepted: {}", field, wanted), field);
  if (!found->is_number_unsigned() || found->get<uint64_t>() != wanted) {
    return invalid(fmt::format("{}: {}; accepted: {}, as {}", field, dump_json(*found), wanted, of_what), field);
  }
  return {};
}

Status take_row(const Json& row, uint32_t layer, uint32_t experts, uint32_t ranks, std::vector<uint16_t>& out) {
  const auto field = fmt::format("placement[{}]", layer);
  if (!row.is_array() || row.size() != experts) {
    return invalid(fmt::format("{}: {}; accepted: an array of {}, one rank for each expert", field,
                               row.is_array() ? fmt::format("{} entries", row.size()) : "not an array", experts),
                   field);
  }
  for (uint32_t e = 0; e < experts; ++e) {
    if (!row[e].is_number_unsigned() || row[e].get<uint64_t>() >= ranks) {
      const auto entry = fmt::format("{}[{}]", field, e);
      return invalid(fmt::format("{}: {}; accepted: a rank, 0..{}", entry, dump_json(row[e]), ranks - 1), entry);
    }
    out.push_back(row[e].get<uint16_t>());
  }
  return {};
}

}  // namespace

ExpertPlacement linear_placement(uint32_t layers, uint32_t experts, uint32_t ranks) {
  ExpertPlacement out{layers, experts, ranks, {}};
  out.rank_of.reserve(size_t{layers} * experts);
  for (uint32_t l = 0; l < layers; ++l) {
    for (uint32_t e = 0; e < experts; ++e) out.rank_of.push_back(static_cast<uint16_t>(uint64_t{e} * ranks / experts));
  }
  return out;
}

Result<ExpertPlacement> parse_expert_placement(std::string_view text, uint32_t layers, uint32_t experts,
                                               uint32_t ranks) {
  const Json document = parse_json(text);
  if (!document.is_object()) return invalid("the placement is not a JSON object");
  if (Status good = check_number(document, "layers", layers, "the model has MoE layers"); !good) return good.error();
  if (Status good = check_number(document, "experts", experts, "the model has experts a layer"); !good)
    return good.error();
  if (Status good = check_number(document, "ranks", ranks, "there are expert ranks"); !good) return good.error();
  const auto rows = document.find("placement");
  if (rows == document.end() || !rows->is_array() || rows->size() != layers) {
    return invalid(fmt::format("placement: accepted: an array of {} rows, one for each MoE layer", layers),
                   "placement");
  }
  ExpertPlacement out{layers, experts, ranks, {}};
  for (uint32_t l = 0; l < layers; ++l) {
    if (Status good = take_row((*rows)[l], l, experts, ranks, out.rank_of); !good) return good.error();
  }
  return out;
}

Result<ExpertPlacement> load_expert_placement(const std::string& path, uint32_t layers, uint32_t experts,
                                              uint32_t ranks) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return Error{ErrorCode::kNotFound, fmt::format("{}: cannot be opened", path), "expert_placement"};
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  auto parsed = parse_expert_placement(text, layers, experts, ranks);
  if (!parsed)
    return Error{parsed.error().code, fmt::format("{}: {}", path, parsed.error().message), "expert_placement"};
  return parsed;
}

}  // namespace kindred::engine
