#include "place/json_numbers.h"

#include <fmt/format.h>

namespace kindred::place {
namespace {

Status flatten(const Json& list, size_t level, std::string_view field, NumberGrid& out) {
  if (!list.is_array() || list.empty()) {
    return invalid(fmt::format("accepted: {} levels of lists that are not empty", out.shape.size()),
                   std::string(field));
  }
  size_t& expected = out.shape[level];
  if (expected == 0) expected = list.size();
  if (list.size() != expected) {
    return invalid(fmt::format("a list of {} beside one of {}; accepted: equal lengths", list.size(), expected),
                   std::string(field));
  }
  for (const Json& element : list) {
    if (level + 1 < out.shape.size()) {
      if (Status good = flatten(element, level + 1, field, out); !good) return good;
    } else if (element.is_number()) {
      out.values.push_back(element.get<double>());
    } else {
      return invalid("accepted: numbers", std::string(field));
    }
  }
  return {};
}

}  // namespace

size_t depth(const Json& list) { return list.is_array() ? 1 + (list.empty() ? 0 : depth(list.front())) : 0; }

Result<NumberGrid> read_numbers(const Json& list, size_t levels, std::string_view field) {
  NumberGrid grid;
  grid.shape.assign(levels, 0);
  if (Status good = flatten(list, 0, field, grid); !good) return std::move(good).error();
  return grid;
}

Result<std::vector<std::vector<uint32_t>>> slots_from_numbers(const NumberGrid& grid) {
  std::vector<std::vector<uint32_t>> rows(grid.shape[0]);
  for (size_t i = 0; i < grid.values.size(); ++i) {
    const double value = grid.values[i];
    if (!(value >= 0) || value >= 65'536 || value != static_cast<double>(static_cast<uint32_t>(value))) {
      return invalid(fmt::format("layer {}, slot {}: {} is no expert", i / grid.shape[1], i % grid.shape[1], value),
                     "physical_to_logical_map");
    }
    rows[i / grid.shape[1]].push_back(static_cast<uint32_t>(value));
  }
  return rows;
}

}  // namespace kindred::place
