#include "engine/rank_threads.h"

#include <fmt/format.h>

#include <deque>
#include <exception>
#include <thread>
#include <utility>

#include "base/log.h"
#include "engine/rank_topology.h"

namespace kindred::engine {

using SteadyClock = std::chrono::steady_clock;

// Shared with its thread, which may outlive RankThreads if it has stalled.
struct RankThreads::Rank {
  uint32_t index = 0;
  std::vector<uint32_t> cpus;
  std::chrono::microseconds spin{0};
  std::mutex mutex;
  std::condition_variable wake;
  std::deque<std::shared_ptr<RankJob>> queue;  // one per thread that is in run()
  std::atomic<uint32_t> queued{0};             // its length, to look at without the lock
  std::shared_ptr<RankJob> current;
  bool stopping = false;
  std::thread thread;
};

namespace {

void spin_until(std::chrono::microseconds spin, const auto& ready) {
  if (spin.count() == 0) return;
  const auto end = SteadyClock::now() + spin;
  while (!ready() && SteadyClock::now() < end) {
  }
}

}  // namespace

RankThreads::RankThreads(RankThreadsOptions options) : options_(std::move(options)) {
  for (uint32_t r = 0; r < options_.ranks; ++r) {
    auto rank = std::make_shared<Rank>();
    rank->index = r;
    if (r < options_.cpus.size()) rank->cpus = options_.cpus[r];
    rank->spin = options_.spin;
    if (!first_thread(r)) rank->thread = std::thread([rank] { serve(rank); });
    ranks_.push_back(std::move(rank));
  }
}

RankThreads::~RankThreads() {
  for (const auto& rank : ranks_) {
    if (!rank->thread.joinable()) continue;
    bool stalled = false;
    {
      const std::lock_guard lock(rank->mutex);
      rank->stopping = true;
      if (rank->current) {
        const std::lock_guard of_job(rank->current->mutex_);
        stalled = rank->current->abandoned_;
      }
    }
    rank->wake.notify_one();
    if (stalled) {
      rank->thread.detach();
    } else {
      rank->thread.join();
    }
  }
}

void RankThreads::work(RankJob& job, uint32_t rank) {
  {
    const std::lock_guard lock(job.mutex_);
    if (job.abandoned_) return;
  }
  bool good = false;
  try {
    good = job.compute(rank);
  } catch (const std::exception& e) {
    Logger("expert ranks").error("rank {}: {}", rank, e.what());
  }
  {
    const std::lock_guard lock(job.mutex_);
    if (job.abandoned_) return;
    ++job.delivering_;
  }
  if (good) job.deliver(rank);
  const std::lock_guard lock(job.mutex_);
  --job.delivering_;
  if (!good) job.failed_ = true;
  job.left_.fetch_sub(1);
  job.changed_.notify_all();
}

void RankThreads::serve(const std::shared_ptr<Rank>& rank) {
  if (!pin_this_thread(rank->cpus)) {
    Logger("expert ranks").warn("rank {}: the system does not let it be pinned", rank->index);
  }
  for (;;) {
    spin_until(rank->spin, [&] { return rank->queued.load() > 0; });
    {
      std::unique_lock lock(rank->mutex);
      rank->current.reset();
      rank->wake.wait(lock, [&] { return rank->stopping || !rank->queue.empty(); });
      if (rank->queue.empty()) return;
      rank->current = std::move(rank->queue.front());
      rank->queue.pop_front();
      rank->queued.fetch_sub(1);
    }
    work(*rank->current, rank->index);
  }
}

uint32_t RankThreads::stalled() const {
  uint32_t count = 0;
  for (const auto& rank : ranks_) {
    const std::lock_guard lock(rank->mutex);
    if (!rank->current) continue;
    const std::lock_guard of_job(rank->current->mutex_);
    if (rank->current->abandoned_) ++count;
  }
  return count;
}

void RankThreads::wait(RankJob& job, SteadyClock::time_point deadline) const {
  spin_until(options_.spin, [&] { return job.left_.load() == 0; });
  std::unique_lock lock(job.mutex_);
  const auto done = [&] { return job.left_.load() == 0; };
  if (job.changed_.wait_until(lock, deadline, done)) return;
  job.changed_.wait(lock, [&] { return job.delivering_ == 0; });  // copies that are being made, soon over
  job.abandoned_ = job.left_.load() != 0;
}

Status RankThreads::run(const std::shared_ptr<RankJob>& job, std::chrono::milliseconds timeout) {
  const auto deadline = SteadyClock::now() + timeout;
  std::vector<Rank*> parts;
  for (const auto& rank : ranks_) {
    if (job->takes_part(rank->index)) parts.push_back(rank.get());
  }
  job->left_.store(static_cast<uint32_t>(parts.size()));
  const bool first_too = !parts.empty() && first_thread(parts.front()->index);
  if (parts.size() > (first_too ? 1U : 0U)) {
    if (const uint32_t missing = stalled(); missing > 0) {
      return Error{ErrorCode::kTimeout, fmt::format("{} of {} expert ranks have stalled", missing, options_.ranks)};
    }
  }
  for (Rank* rank : parts) {
    if (first_thread(rank->index)) continue;
    {
      const std::lock_guard lock(rank->mutex);
      rank->queue.push_back(job);
      rank->queued.fetch_add(1);
    }
    rank->wake.notify_one();
  }
  if (first_too) work(*job, 0);
  wait(*job, deadline);
  const std::lock_guard lock(job->mutex_);
  if (job->abandoned_) {
    const auto message = fmt::format("an expert rank did not answer within {} ms", timeout.count());
    Logger("expert ranks").error("{}: the step fails", message);
    return Error{ErrorCode::kTimeout, message};
  }
  if (job->failed_) return Error{ErrorCode::kInternal, "an expert rank could not compute its part"};
  return {};
}

}  // namespace kindred::engine
