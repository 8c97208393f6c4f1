#include "engine/memory.h"

#include <fstream>
#include <string>

namespace kindred::engine {

std::optional<uint64_t> available_memory_bytes() {
  std::ifstream file("/proc/meminfo");
  std::string name, unit;
  uint64_t kilobytes = 0;
  while (file >> name >> kilobytes) {
    if (name == "MemAvailable:") return kilobytes * 1024;
    std::getline(file, unit);
  }
  return std::nullopt;
}

}  // namespace kindred::engine
