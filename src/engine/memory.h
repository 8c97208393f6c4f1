// How much memory this machine has left.
//
// Thread-safety: pure function of the system's state.
#pragma once

#include <cstdint>
#include <optional>

namespace kindred::engine {

// Memory that can be had without swapping; nothing where the system does not say.
std::optional<uint64_t> available_memory_bytes();

}  // namespace kindred::engine
