// Brings a running placement to a target, one expert at a time, a few per step.
//
// Each move is copy, change of owner, release of the old copy; whenever it stops, what there is is a valid
// placement. A copy is made in pieces, since nobody reads it before it is whole, with pauses in between: whatever an
// expert's size, a step loses a small share of its time to moves. It has a thread of its own, so that a step shares
// processors with it but never waits for it.
//
// Thread-safety: all from any thread.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>

#include "engine/expert_placement.h"

namespace kindred::engine {

struct MigrationProgress {
  bool active = false, cancelled = false;
  uint64_t moved = 0, remaining = 0;  // of the last target
  uint64_t bytes = 0;                 // of the last target
  double seconds = 0;                 // since it was set, until it was reached or cancelled
  uint64_t total_moves = 0, total_bytes = 0;
};

// How an expert is moved. Called on the migration's thread, one at a time.
class ExpertMover {
 public:
  virtual ~ExpertMover() = default;
  virtual uint64_t expert_bytes(uint32_t layer) const = 0;
  // Bytes [begin, end) of the expert, to the rank that is to have it.
  virtual void copy(uint32_t layer, uint32_t expert, uint16_t to, uint64_t begin, uint64_t end) = 0;
  // All are there: that copy is read from now on, and the old one is given back.
  virtual void finish(uint32_t layer, uint32_t expert, uint16_t to) = 0;
  // The copy that was begun is not wanted any more.
  virtual void drop(uint32_t layer, uint32_t expert, uint16_t to) = 0;
};

struct MigrationPace {
  uint32_t moves_per_step = 1;     // at most
  uint64_t piece_bytes = 1 << 17;  // well below the time of a step
  double share = 0.1;              // of the time while steps run, that is spent on moves; in (0, 1]
};

class ExpertMigration {
 public:
  // `mover` must outlive it.
  ExpertMigration(ExpertPlacement current, const MigrationPace& pace, ExpertMover& mover);
  ~ExpertMigration();  // stops after the piece in progress
  ExpertMigration(const ExpertMigration&) = delete;
  ExpertMigration& operator=(const ExpertMigration&) = delete;

  // Replaces the target before it, moves made so far stay. Of the same shape as the current placement.
  void set_target(ExpertPlacement target);
  void cancel();
  // Each step allows the next few moves. Between steps, after a short pause, there is no limit.
  void begin_step();
  void end_step();

  ExpertPlacement current() const;
  MigrationProgress progress() const;
  bool active() const { return active_.load(std::memory_order_relaxed); }
  // Until no target is left. For tests, and before anything is served.
  void wait() const;

 private:
  // An expert on its way.
  struct Copy {
    uint32_t layer = 0, expert = 0;
    uint16_t to = 0;
    uint64_t done = 0;  // bytes
  };
  void run();
  bool find_next(std::unique_lock<std::mutex>& lock);
  bool may_begin(std::unique_lock<std::mutex>& lock);
  void copy_piece(std::unique_lock<std::mutex>& lock);
  void rest(std::unique_lock<std::mutex>& lock, std::chrono::steady_clock::duration worked);
  void finish(uint64_t bytes);
  void end(bool cancelled);
  void count_remaining();

  const MigrationPace pace_;
  ExpertMover& mover_;
  mutable std::mutex mutex_;
  mutable std::condition_variable wake_;
  ExpertPlacement current_;
  std::optional<ExpertPlacement> target_;
  std::optional<Copy> copy_;         // the thread's
  size_t next_ = 0;                  // experts before it are where the target wants them
  uint32_t credit_ = 0, steps_ = 0;  // moves allowed; steps in progress
  bool idle_ = false;
  std::chrono::steady_clock::time_point began_{};
  MigrationProgress progress_;
  bool stopping_ = false;
  std::atomic<bool> active_{false};  // progress_.active, to look at without the lock
  std::thread thread_;
};

}  // namespace kindred::engine
