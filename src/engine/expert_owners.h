// Which rank owns each expert of one layer: read by layer dispatches of any thread while a migration changes it.
//
// A move must not take the old copy away from a dispatch that has already seen its owner. So readers count
// themselves in one of two epochs, and move() returns when the epoch before its own has no reader left:
// new readers never keep it waiting, and nobody waits to read.
//
// Thread-safety: read() and owner() from any thread; move() from one thread at a time.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <vector>

namespace kindred::engine {

class ExpertOwners {
 public:
  explicit ExpertOwners(const std::vector<uint16_t>& owners);

  // While it lives, the copies of the owners that it has seen stay whole.
  class Reading {
   public:
    explicit Reading(ExpertOwners& owners);
    ~Reading();
    Reading(const Reading&) = delete;
    Reading& operator=(const Reading&) = delete;
    uint16_t owner(uint32_t expert) const { return owners_.owner(expert); }

   private:
    ExpertOwners& owners_;
    uint32_t parity_ = 0;
  };

  size_t experts() const { return owners_.size(); }
  // May be old as soon as it is returned.
  uint16_t owner(uint32_t expert) const { return owners_[expert].load(std::memory_order_acquire); }

  // The new copy must be whole. Afterwards nobody reads the old one.
  void move(uint32_t expert, uint16_t to);

 private:
  std::vector<std::atomic<uint16_t>> owners_;
  std::atomic<uint32_t> epoch_{0};
  std::array<std::atomic<uint32_t>, 2> readers_{};  // by the epoch's parity
};

}  // namespace kindred::engine
