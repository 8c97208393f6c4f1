// The threads of the expert ranks, and the hand-off of a layer's work to them.
//
// A dispatch is a RankJob: each rank computes its part on its own thread and delivers it; run() returns when
// all parts are there. A rank that does not answer in time makes the dispatch fail, not hang: the job is then
// abandoned, nothing of it is delivered any more, and the memory it reads is its own.
//
// Thread-safety: run() from any thread; jobs of different threads take turns at each rank.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/result.h"

namespace kindred::engine {

class RankJob {
 public:
  virtual ~RankJob() = default;
  virtual bool takes_part(uint32_t rank) const = 0;
  // Reads nothing but what the job owns or what lives as long as the ranks. False: it failed.
  virtual bool compute(uint32_t rank) = 0;
  // Writes the results where the caller of run() wants them.
  virtual void deliver(uint32_t rank) = 0;

 private:
  friend class RankThreads;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<uint32_t> left_{0};  // ranks that have not finished
  uint32_t delivering_ = 0;
  bool failed_ = false, abandoned_ = false;
};

struct RankThreadsOptions {
  uint32_t ranks = 1;
  std::vector<std::vector<uint32_t>> cpus = {};  // per rank; an empty list: not pinned
  // Rank 0's part runs on the caller's thread: one hand-off less, where memory is equally near everywhere.
  bool caller_is_rank_0 = true;
  // How long threads look for work, or for its end, before they sleep. Only where each has a core.
  std::chrono::microseconds spin{0};
  std::chrono::milliseconds stall_timeout{30'000};
};

class RankThreads {
 public:
  explicit RankThreads(RankThreadsOptions options);
  // Waits for work in progress, but not for a rank that has stalled.
  ~RankThreads();
  RankThreads(const RankThreads&) = delete;
  RankThreads& operator=(const RankThreads&) = delete;

  const RankThreadsOptions& options() const { return options_; }

  // Errors: kTimeout (a rank has stalled, now or earlier and is still not back), kInternal (a part failed).
  Status run(const std::shared_ptr<RankJob>& job) { return run(job, options_.stall_timeout); }
  Status run(const std::shared_ptr<RankJob>& job, std::chrono::milliseconds timeout);

  // Ranks that have not come back from an abandoned job.
  uint32_t stalled() const;

 private:
  struct Rank;
  static void serve(const std::shared_ptr<Rank>& rank);
  static void work(RankJob& job, uint32_t rank);
  bool first_thread(uint32_t rank) const { return rank == 0 && options_.caller_is_rank_0; }
  void wait(RankJob& job, std::chrono::steady_clock::time_point deadline) const;

  const RankThreadsOptions options_;
  std::vector<std::shared_ptr<Rank>> ranks_;
};

}  // namespace kindred::engine
