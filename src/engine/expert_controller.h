// Keeps the placement of a worker's expert ranks near what its traffic asks for: each window's traffic goes to
// place::Rebalancer, and what pays is applied.
//
// Thread-safety: report() from any thread. It has a thread of its own.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "engine/rank_counts.h"
#include "place/rebalance.h"

namespace kindred::engine {

class ExpertRanks;

struct ExpertControllerOptions {
  std::chrono::milliseconds window{10'000};
  place::RebalanceOptions rebalance = {};
  place::Weights weights = {};  // of the solver's objective
};
// With a CPU's figures for what a move and a token cost, and weights that say the same. `eplb` places anew whether it
// pays or not, as vLLM does.
ExpertControllerOptions cpu_controller_options(const ExpertRanks& ranks, place::Solver solver = place::Solver::kFlow);

struct ExpertControllerReport {
  uint64_t windows = 0, applied = 0, failed = 0;
  std::string reason;  // of the last window, in words
};

class ExpertController {
 public:
  // `ranks` must outlive it.
  ExpertController(ExpertRanks& ranks, const ExpertControllerOptions& options);
  ~ExpertController();
  ExpertController(const ExpertController&) = delete;
  ExpertController& operator=(const ExpertController&) = delete;

  ExpertControllerReport report() const;
  const ExpertControllerOptions& options() const { return options_; }

 private:
  void run();
  void window();  // one window has passed
  std::string decide(const RankTraffic& since);

  ExpertRanks& ranks_;
  const ExpertControllerOptions options_;
  RankTraffic seen_;  // up to the last window
  std::optional<place::Rebalancer> rebalancer_;
  uint32_t sources_ = 0;  // that it was made for
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  bool stopping_ = false;
  ExpertControllerReport report_;
  std::thread thread_;
};

}  // namespace kindred::engine
