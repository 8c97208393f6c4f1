#include "engine/expert_migration.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/result.h"

namespace kindred::engine {
namespace {

// Without steps nothing can be slowed down, and a placement would wait for ever.
constexpr std::chrono::milliseconds kIdle{20};

}  // namespace

ExpertMigration::ExpertMigration(ExpertPlacement current, const MigrationPace& pace, ExpertMover& mover)
    : pace_(pace), mover_(mover), current_(std::move(current)) {
  KINDRED_CHECK(pace_.piece_bytes > 0 && pace_.share > 0 && pace_.share <= 1);
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
  credit_ = pace_.moves_per_step;
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

// Waits for a target that something is left to do for. False: the end.
bool ExpertMigration::find_next(std::unique_lock<std::mutex>& lock) {
  for (;;) {
    wake_.wait(lock, [this] { return target_ || stopping_; });
    if (stopping_) return false;
    while (next_ < current_.rank_of.size() && target_->rank_of[next_] == current_.rank_of[next_]) ++next_;
    if (next_ < current_.rank_of.size()) return true;
    end(false);
    wake_.notify_all();
  }
}

// Waits until another expert may be begun. False: things have changed meanwhile.
bool ExpertMigration::may_begin(std::unique_lock<std::mutex>& lock) {
  if (idle_) return true;
  if (credit_ > 0) {
    --credit_;
    return true;
  }
  const auto changed = [this] { return credit_ > 0 || !target_ || stopping_; };
  idle_ = !wake_.wait_for(lock, kIdle, changed) && steps_ == 0;
  return false;
}

void ExpertMigration::copy_piece(std::unique_lock<std::mutex>& lock) {
  Copy& copy = *copy_;
  const auto began = std::chrono::steady_clock::now();
  lock.unlock();
  const uint64_t bytes = mover_.expert_bytes(copy.layer);
  const uint64_t end = std::min(copy.done + pace_.piece_bytes, bytes);
  mover_.copy(copy.layer, copy.expert, copy.to, copy.done, end);
  copy.done = end;
  const bool whole = end == bytes;
  if (whole) mover_.finish(copy.layer, copy.expert, copy.to);
  lock.lock();
  if (whole) finish(bytes);
  rest(lock, std::chrono::steady_clock::now() - began);
}

// Until what was done is no more than its share of the time.
void ExpertMigration::rest(std::unique_lock<std::mutex>& lock, std::chrono::steady_clock::duration worked) {
  if (idle_ || !target_) return;
  const auto pause = std::chrono::duration_cast<std::chrono::nanoseconds>(worked * (1 / pace_.share - 1));
  wake_.wait_for(lock, pause, [this] { return !target_ || stopping_; });
}

void ExpertMigration::finish(uint64_t bytes) {
  const Copy done = *std::exchange(copy_, std::nullopt);
  current_.rank_of[size_t{done.layer} * current_.experts + done.expert] = done.to;
  ++progress_.total_moves;
  progress_.total_bytes += bytes;
  if (!target_) return;  // cancelled meanwhile
  ++progress_.moved;
  progress_.bytes += bytes;
  count_remaining();
}

void ExpertMigration::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    if (copy_) {
      const size_t cell = size_t{copy_->layer} * current_.experts + copy_->expert;
      if (!target_ || target_->rank_of[cell] != copy_->to) {  // cancelled, or replaced
        const Copy unwanted = *std::exchange(copy_, std::nullopt);
        lock.unlock();
        mover_.drop(unwanted.layer, unwanted.expert, unwanted.to);
        lock.lock();
        continue;
      }
      if (stopping_) return;
      copy_piece(lock);
      continue;
    }
    if (!find_next(lock)) return;
    if (!may_begin(lock)) continue;
    copy_ = Copy{.layer = static_cast<uint32_t>(next_ / current_.experts),
                 .expert = static_cast<uint32_t>(next_ % current_.experts),
                 .to = target_->rank_of[next_]};
  }
}

}  // namespace kindred::engine
