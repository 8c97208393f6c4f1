// Brings a running placement to a target, one expert at a time, a few per step.
//
// Each move is copy, change of owner, release of the old copy; whenever it stops, what there is is a valid
// placement. It has a thread of its own, so that a step shares processors with it but never waits for it.
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

class ExpertMigration {
 public:
  // `move` copies, changes the owner and releases; returns the bytes. Called on the migration's thread.
  using Move = std::function<uint64_t(uint32_t layer, uint32_t expert, uint16_t to)>;

  ExpertMigration(ExpertPlacement current, uint32_t moves_per_step, Move move);
  ~ExpertMigration();  // stops after the move in progress
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
  void run();
  bool find_next(std::unique_lock<std::mutex>& lock);
  void end(bool cancelled);
  void count_remaining();

  const uint32_t moves_per_step_;
  const Move move_;
  mutable std::mutex mutex_;
  mutable std::condition_variable wake_;
  ExpertPlacement current_;
  std::optional<ExpertPlacement> target_;
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
