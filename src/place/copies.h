// Which experts get copies, and where: a layer with redundant slots.
//
// Copies are placed by source. An expert's next copy would serve those sources that all its copies so far are far
// from; the experts for which that saves most get the redundant slots. Each copy's part of the traffic is then a row
// of its own, all rows are settled at once (place/settle.h), and a descent on the true objective, in which sources
// choose the nearest copy, swaps what two slots hold and replaces copies by others while that pays.
//
// Thread-safety: pure.
#pragma once

#include <cstdint>
#include <vector>

#include "place/routing.h"
#include "place/settle.h"

namespace kindred::place {

// [E]: the ranks that hold each expert, ascending, each once; every rank is exactly full.
std::vector<std::vector<uint32_t>> place_copies(const LayerRouting& routing, Settler& settler);

}  // namespace kindred::place
