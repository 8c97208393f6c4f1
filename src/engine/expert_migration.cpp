#include "engine/expert_migration.h"

#include <chrono>
#include <utility>

#include "base/result.h"

namespace kindred::engine {
namespace {

// Without steps nothing can be slowed down, and a placement would wait for ever.
constexpr std::chrono::milliseconds kIdle{20};

}  // namespace

ExpertMigration::ExpertMigration(ExpertPlacement current, uint32_t moves_per_step, Move move)
    : moves_per_step_(moves_per_step), move_(std::move(move)), current_(std::move(current)) {
  thread_ = std::thread([this] { run(); });
}

ExpertMigration::~ExpertMigration() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

void ExpertMigration::set_target(ExpertPlacement target) {
  KINDRED_CHECK(target.rank_of.size() == current_.rank_of.size());
  {
    const std::lock_guard lock(mutex_);
    target_ = std::move(target);
    next_ = 0;
    began_ = std::chrono::steady_clock::now();
    progress_.active = true;
    active_.store(true);
    progress_.cancelled = false;
    progress_.moved = progress_.bytes = progress_.remaining = 0;
    count_remaining();
  }
  wake_.notify_all();
}

void ExpertMigration::count_remaining() {
  progress_.remaining = 0;
  for (size_t i = 0; i < current_.rank_of.size(); ++i) {
    if (target_->rank_of[i] != current_.rank_of[i]) ++progress_.remaining;
  }
}

void ExpertMigration::cancel() {
  const std::lock_guard lock(mutex_);
  if (target_) end(true);
  wake_.notify_all();
}

void ExpertMigration::begin_step() {
  const std::lock_guard lock(mutex_);
  ++steps_;
  idle_ = false;
  if (!target_) return;
  credit_ = moves_per_step_;
  wake_.notify_all();
}

void ExpertMigration::end_step() {
  const std::lock_guard lock(mutex_);
  --steps_;
}

void ExpertMigration::end(bool cancelled) {
  target_.reset();
  progress_.active = false;
  active_.store(false);
  progress_.cancelled = cancelled;
  progress_.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began_).count();
}

ExpertPlacement ExpertMigration::current() const {
  const std::lock_guard lock(mutex_);
  return current_;
}

MigrationProgress ExpertMigration::progress() const {
  const std::lock_guard lock(mutex_);
  MigrationProgress out = progress_;
  if (out.active) out.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began_).count();
  return out;
}

void ExpertMigration::wait() const {
  std::unique_lock lock(mutex_);
  wake_.wait(lock, [this] { return !target_ || stopping_; });
}

// Waits for a target and the leave to move. False: the end.
bool ExpertMigration::find_next(std::unique_lock<std::mutex>& lock) {
  for (;;) {
    wake_.wait(lock, [this] { return target_ || stopping_; });
    if (stopping_) return false;
    while (next_ < current_.rank_of.size() && target_->rank_of[next_] == current_.rank_of[next_]) ++next_;
    if (next_ == current_.rank_of.size()) {
      end(false);
      wake_.notify_all();
      continue;
    }
    if (idle_) return true;
    if (credit_ > 0) {
      --credit_;
      return true;
    }
    const auto changed = [this] { return credit_ > 0 || !target_ || stopping_; };
    idle_ = !wake_.wait_for(lock, kIdle, changed) && steps_ == 0;
  }
}

void ExpertMigration::run() {
  std::unique_lock lock(mutex_);
  while (find_next(lock)) {
    const size_t cell = next_;
    const uint16_t to = target_->rank_of[cell];
    const auto layer = static_cast<uint32_t>(cell / current_.experts);
    const auto expert = static_cast<uint32_t>(cell % current_.experts);
    lock.unlock();
    const uint64_t bytes = move_(layer, expert, to);
    lock.lock();
    current_.rank_of[cell] = to;
    ++progress_.total_moves;
    progress_.total_bytes += bytes;
    if (!target_) continue;  // cancelled meanwhile
    ++progress_.moved;
    progress_.bytes += bytes;
    count_remaining();
  }
}

}  // namespace kindred::engine
