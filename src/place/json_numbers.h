// Nested lists of numbers out of JSON trees.
//
// Thread-safety: pure functions.
#pragma once

#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/result.h"

namespace kindred::place {

struct NumberGrid {
  std::vector<size_t> shape;   // of every level
  std::vector<double> values;  // row-major
};

// Lists within lists, by the first element of each; 0: no list.
size_t depth(const Json& list);

// Error: kInvalid with `field`: not so deep, empty, not rectangular, or something else than numbers.
Result<NumberGrid> read_numbers(const Json& list, size_t levels, std::string_view field);

// Rows of whole numbers below 2^16. Error: kInvalid.
Result<std::vector<std::vector<uint32_t>>> slots_from_numbers(const NumberGrid& grid);

}  // namespace kindred::place
