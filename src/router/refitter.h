// Keeps the cohorts in step with traffic and fleet, while requests go on: collects the counts of recent
// requests, has new cohorts fitted of them on a thread of its own, one fit at a time, and installs the
// result between two decisions.
//
// Cohorts and workers. A decode worker that comes up without a cohort takes half of the largest one, as soon
// as the window allows. One that is down or removed keeps its cohort for the grace period; then its cohort
// is given up, and its requests go to whichever cohort is nearest. All others keep their rows. No cohort is
// given up while no other worker with one is up: after a failure of the whole fleet everything is as it was.
//
// Ownership: held by the core, which must outlive it. stop() before the io_context goes.
// Thread-safety: confined to the control loop, but for observe() and window_requests(), which any thread may call; the
// fit runs beside it, on its own data.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "expert/refit.h"
#include "router/core.h"

namespace kindred::router {

struct RefitStatus {
  struct Last {
    int64_t unix_s = 0;
    double duration_s = 0;
    uint64_t requests = 0;
    double shift = 0;  // mean of 1 - cosine between old and new centroids; 0 for the first
  };
  uint64_t fits = 0, splits = 0, merges = 0, skipped = 0, failures = 0;
  std::optional<Last> last;  // installed
  std::string last_skip;     // why there was no fit when one was due; empty once there was one
  std::string last_error;    // of the last that failed; empty once one worked
};

class Refitter : public std::enable_shared_from_this<Refitter> {
 public:
  using Fit = std::function<Result<expert::RefitReport>(const expert::RefitTask&)>;

  // `fit` runs on another thread. Another one than expert::refit is for tests.
  explicit Refitter(Core& core, Fit fit = expert::refit);
  ~Refitter() { stop(); }

  // Of a request that was just prefilled. O(1).
  void observe(std::string_view fingerprint, std::shared_ptr<const expert::ExpertCounts> counts);

  // Does what is due at this moment of the core's clock. True: a fit was started.
  bool tick();
  // Waits for a running fit, whose result is dropped. Nothing starts any more.
  void stop();

  bool running() const { return running_; }
  size_t window_requests() const;
  const RefitStatus& status() const { return status_; }

 private:
  void tidy_window(MonotonicTime now);
  void give_up_cohorts_of_the_gone();
  std::vector<fleet::WorkerId> newcomers() const;
  std::string fingerprint(std::span<const expert::WindowEntry> window) const;
  expert::RefitTask task_for(size_t newcomers, bool move_all) const;
  void start(expert::RefitTask task);
  void finished(const Result<expert::RefitReport>& report);
  void install(const expert::RefitReport& report);

  Core& core_;
  Fit fit_;
  mutable std::mutex window_mutex_;  // guards the window
  expert::CountsWindow window_;
  RefitStatus status_;
  MonotonicTime last_start_;  // of the last fit of all cohorts, or of this object
  MonotonicTime began_;       // of the one that runs
  bool running_ = false, moves_all_ = false, stopped_ = false;
  uint64_t started_ = 0, dropped_seen_ = 0;
  std::vector<fleet::WorkerId> joining_;  // whom the running fit, or the last one, is to give a cohort
  std::jthread thread_;                   // last: joined before anything else goes
};

// Ticks until the router closes, if refit is on.
void start_refitting(const CorePtr& core);

}  // namespace kindred::router
