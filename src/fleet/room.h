// What room decode workers have, so that a prefill is not spent on a request that nobody can decode.
//
// A worker is full while `per_worker` requests (choices count each) are at it, or for a while after it has
// said so itself. A request reserves room in its pool before its prefill, and gives that up for a place at
// the worker that it is decoded on.
//
// Thread-safety: all methods take one mutex; guards may be dropped on any thread, also after the room.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>

#include "base/clock.h"
#include "fleet/fleet.h"

namespace kindred::fleet {

// Room that is taken while it lives. Movable; empty ones hold nothing.
class RoomGuard {
 public:
  RoomGuard() = default;
  RoomGuard(RoomGuard&& other) noexcept;
  RoomGuard& operator=(RoomGuard&& other) noexcept;
  ~RoomGuard() { release(); }
  void release();  // early; later calls do nothing

 private:
  friend class DecodeRoom;
  struct Counts;
  RoomGuard(std::shared_ptr<Counts> counts, std::shared_ptr<int64_t> cell, int64_t load);

  std::shared_ptr<Counts> counts_;
  std::shared_ptr<int64_t> cell_;
  int64_t load_ = 0;
};

class DecodeRoom {
 public:
  // `per_worker`: 0 for no limit. `clock` is borrowed.
  DecodeRoom(const Clock& clock, int64_t per_worker);

  struct Answer {
    std::optional<RoomGuard> guard;  // nothing: no room
    std::chrono::milliseconds retry_after_ms{0};
  };
  // Room for `load` among `workers`, the ones that are up for `pool` (a model's name). A load larger than
  // any worker takes needs a worker that is empty.
  Answer reserve(std::string_view pool, std::span<const WorkerId> workers, int64_t load);
  // A place at `worker`, whether it has room or not.
  [[nodiscard]] RoomGuard occupy(WorkerId worker, int64_t load);
  bool full(WorkerId worker) const;
  void set_limit(int64_t per_worker);  // for what comes from now on

  // The worker has said that it is full. At most kMaxFullMs are believed.
  void report_full(WorkerId worker, std::chrono::milliseconds how_long);
  static constexpr std::chrono::milliseconds kMaxFullMs{10'000};

 private:
  const Clock& clock_;
  std::shared_ptr<RoomGuard::Counts> counts_;
};

}  // namespace kindred::fleet
