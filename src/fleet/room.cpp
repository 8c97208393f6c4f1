#include "fleet/room.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>

namespace kindred::fleet {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kSomethingEnds{1'000};  // when a place may be free again, nobody knows

}  // namespace

struct RoomGuard::Counts {
  struct Worker {
    std::shared_ptr<int64_t> load = std::make_shared<int64_t>(0);
    MonotonicTime full_until;
  };

  std::mutex mutex;
  int64_t per_worker = 0;
  std::unordered_map<WorkerId, Worker> workers;                        // at most as many as there are ids
  std::map<std::string, std::shared_ptr<int64_t>, std::less<>> pools;  // with something reserved

  int64_t free_at(const Worker& worker, MonotonicTime now) const {
    if (worker.full_until > now) return 0;
    return per_worker == 0 ? INT64_MAX : std::max<int64_t>(0, per_worker - *worker.load);
  }
};

RoomGuard::RoomGuard(std::shared_ptr<Counts> counts, std::shared_ptr<int64_t> cell, int64_t load)
    : counts_(std::move(counts)), cell_(std::move(cell)), load_(load) {
  *cell_ += load_;
}

RoomGuard::RoomGuard(RoomGuard&& other) noexcept
    : counts_(std::move(other.counts_)), cell_(std::move(other.cell_)), load_(std::exchange(other.load_, 0)) {}

RoomGuard& RoomGuard::operator=(RoomGuard&& other) noexcept {
  if (this != &other) {
    release();
    counts_ = std::move(other.counts_);
    cell_ = std::move(other.cell_);
    load_ = std::exchange(other.load_, 0);
  }
  return *this;
}

void RoomGuard::release() {
  if (!counts_) return;
  const std::shared_ptr<Counts> counts = std::exchange(counts_, nullptr);
  const std::lock_guard lock(counts->mutex);
  *cell_ -= std::exchange(load_, 0);
  cell_.reset();
}

DecodeRoom::DecodeRoom(const Clock& clock, int64_t per_worker)
    : clock_(clock), counts_(std::make_shared<RoomGuard::Counts>()) {
  counts_->per_worker = per_worker;
}

DecodeRoom::Answer DecodeRoom::reserve(std::string_view pool, std::span<const WorkerId> workers, int64_t load) {
  const std::lock_guard lock(counts_->mutex);
  const MonotonicTime now = clock_.now();
  // A pool with nothing reserved is forgotten, so that names do not pile up.
  std::erase_if(counts_->pools, [](const auto& entry) { return entry.second.use_count() == 1; });
  auto at = counts_->pools.find(pool);
  const int64_t reserved = at == counts_->pools.end() ? 0 : *at->second;

  milliseconds wait = kSomethingEnds;
  int64_t room = 0;
  for (const WorkerId id : workers) {
    const RoomGuard::Counts::Worker& worker = counts_->workers[id];
    const int64_t free = counts_->free_at(worker, now);
    if (free == INT64_MAX) room = INT64_MAX;
    else if (room != INT64_MAX) room += free;
    if (worker.full_until > now) wait = std::max(wait, std::chrono::ceil<milliseconds>(worker.full_until - now));
  }
  const int64_t needed = counts_->per_worker == 0 ? 1 : std::min(load, counts_->per_worker);
  if (room != INT64_MAX && room - reserved < needed) return {std::nullopt, wait};
  if (at == counts_->pools.end()) at = counts_->pools.emplace(pool, std::make_shared<int64_t>(0)).first;
  return {RoomGuard(counts_, at->second, needed), {}};
}

RoomGuard DecodeRoom::occupy(WorkerId worker, int64_t load) {
  const std::lock_guard lock(counts_->mutex);
  return RoomGuard(counts_, counts_->workers[worker].load, load);
}

void DecodeRoom::set_limit(int64_t per_worker) {
  const std::lock_guard lock(counts_->mutex);
  counts_->per_worker = per_worker;
}

bool DecodeRoom::full(WorkerId worker) const {
  const std::lock_guard lock(counts_->mutex);
  const auto at = counts_->workers.find(worker);
  return at != counts_->workers.end() && counts_->free_at(at->second, clock_.now()) == 0;
}

void DecodeRoom::report_full(WorkerId worker, milliseconds how_long) {
  const std::lock_guard lock(counts_->mutex);
  counts_->workers[worker].full_until = clock_.now() + std::min(how_long, kMaxFullMs);
}

}  // namespace kindred::fleet
