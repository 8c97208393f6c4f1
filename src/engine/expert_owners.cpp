#include "engine/expert_owners.h"

#include <chrono>
#include <thread>

namespace kindred::engine {

ExpertOwners::ExpertOwners(const std::vector<uint16_t>& owners) : owners_(owners.size()) {
  for (size_t e = 0; e < owners.size(); ++e) owners_[e].store(owners[e]);
}

ExpertOwners::Reading::Reading(ExpertOwners& owners) : owners_(owners) {
  // Counted first, then looked again: if the epoch is still the same, the move that ends it sees this reader.
  for (;;) {
    const uint32_t epoch = owners_.epoch_.load();
    parity_ = epoch & 1U;
    owners_.readers_[parity_].fetch_add(1);
    if (owners_.epoch_.load() == epoch) return;
    owners_.readers_[parity_].fetch_sub(1);
  }
}

ExpertOwners::Reading::~Reading() { owners_.readers_[parity_].fetch_sub(1); }

void ExpertOwners::move(uint32_t expert, uint16_t to) {
  constexpr std::chrono::microseconds kPoll{20};  // a layer's dispatch takes as long or longer
  owners_[expert].store(to, std::memory_order_release);
  const uint32_t before = epoch_.fetch_add(1);
  while (readers_[before & 1U].load() != 0) std::this_thread::sleep_for(kPoll);
}

}  // namespace kindred::engine
