// A mock worker's engine in real time: the simulator's scheduler (sim/engine.h), stepped when the cost model says
// that a step would have ended. Average pace is kept over late timers: a step begins when the one before should
// have ended, not when it was noticed.
//
// Who waits for tokens holds a Ticket. A KV transfer takes turns at the receiver's way in.
//
// Thread-safety: confined to one io_context's thread. Times in seconds.
#pragma once

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "base/result.h"
#include "net/task.h"
#include "sim/engine.h"
#include "sim/step_cost.h"

namespace kindred::live {

struct Job {
  uint32_t prompt_tokens = 1, output_tokens = 1;
  uint32_t generated = 0;  // of them, made elsewhere
  bool fetches = false;    // the prompt's KV comes from another worker
  bool hands_off = false;  // ends after its first token; KV stays until release()
  std::shared_ptr<const std::vector<uint32_t>> tokens = nullptr;  // of the prompt, for who publishes KV events
  std::vector<uint64_t> pieces = {};
  sim::RequestExperts experts = {};
  std::function<bool()> kv_there = {};  // with `fetches`: asked when the transfer ends
};

enum class TicketEnd {
  kNone,
  kFinished,
  kHandedOff,
  kKvLost,     // not there any more when the transfer ended
  kCut,        // the worker was killed, or a script cut what was in flight
  kCancelled,  // the client left
};

// Of a request: which of the worker's engines, and where there.
struct Place {
  uint32_t engine = 0, slot = 0;
};

struct Ticket {
  Ticket(const net::asio::any_io_executor& executor, Job of) : job(std::move(of)), wake(executor) {
    generated = job.generated;
    wake.expires_at(std::chrono::steady_clock::time_point::max());
  }

  // Until `generated` exceeds `seen`, the KV has come (if `fetched_before` is false), or it has ended.
  net::Task<void> changed(uint32_t seen, bool fetched_before);

  const Job job;
  uint32_t request = 0;
  Place place;
  uint32_t generated = 0;
  uint32_t cached_tokens = 0;
  bool fetched = false;
  TicketEnd end = TicketEnd::kNone;
  net::asio::steady_timer wake;
};
using TicketPtr = std::shared_ptr<Ticket>;

struct LoopOptions {
  std::shared_ptr<const sim::StepCost> cost;  // not null
  uint32_t ranks = 1;                         // of expert parallelism
  uint32_t engines = 1;                       // data-parallel, each with a KV cache of its own, in lockstep
  sim::EngineOptions engine;
  uint32_t queue = 1024;  // requests that may wait
};

// What changes in the prefix caches; on_cleared: of all engines.
struct CacheListener {
  std::function<void(const Ticket& ticket, size_t held)> on_prefilled = {};  // its first `held` pieces are cached
  std::function<void(uint32_t engine, const std::vector<uint64_t>& pieces)> on_evicted = {};
  std::function<void()> on_cleared = {};
};

struct LoopTotals {
  uint64_t steps = 0, prompt_tokens = 0, generated_tokens = 0, requests = 0;
};

class WorkerLoop : public std::enable_shared_from_this<WorkerLoop> {
 public:
  // `shape`: of all requests' experts.
  WorkerLoop(net::asio::any_io_executor executor, LoopOptions options, const expert::ExpertShape& shape);

  void start();  // once; the loop keeps itself alive until stop()
  void stop();
  void listen(CacheListener listener) { listener_ = std::move(listener); }

  // Error: kExhausted: the queue is full; kTooLarge: the KV cache can never hold it; kUnavailable: killed.
  Result<TicketPtr> submit(Job job);
  void abandon(const TicketPtr& ticket);  // the client left
  void release(Place place);              // of a handed-off request, of this epoch

  // Faults.
  void kill();  // everything in flight is cut, the cache lost; until revive()
  void revive();
  void cut_all();                            // requests in flight, nothing else
  void stall(bool on);                       // no step ends
  void slow(double factor);                  // of all steps that begin from now on; 1: as the cost model says
  uint64_t epoch() const { return epoch_; }  // counts kills: a slot of an earlier one means nothing

  std::span<const sim::Engine> engines() const { return engines_; }
  const LoopTotals& totals() const { return totals_; }
  bool alive() const { return alive_; }
  double kv_transfer_s(double tokens) const { return options_.cost->kv_transfer_s(tokens); }

 private:
  using Time = std::chrono::steady_clock::time_point;

  static net::Task<void> run(std::shared_ptr<WorkerLoop> self);
  static net::Task<void> fetch(std::shared_ptr<WorkerLoop> self, TicketPtr ticket, Time ends);
  net::Task<void> run_step(Time& due);
  double step_s();
  net::Task<void> sleep_until(Time due, uint64_t epoch);
  bool plan();
  size_t waiting() const;
  void deliver();
  void end(const TicketPtr& ticket, TicketEnd how);
  void leave(const Ticket& ticket);
  void kick();

  net::asio::any_io_executor executor_;
  const LoopOptions options_;
  std::vector<sim::Engine> engines_;
  sim::ExpertUnion experts_;
  std::vector<TicketPtr> tickets_;  // by Sequence::request; null: free
  std::vector<uint32_t> free_;
  std::vector<Place> doomed_;  // places to release when the step that runs has ended
  std::vector<uint32_t> fetches_;
  std::vector<sim::Emitted> emitted_;
  std::vector<sim::StepShape> shapes_;  // of the step that runs, by engine
  CacheListener listener_;
  LoopTotals totals_;
  net::asio::steady_timer timer_;
  Time in_free_{};  // its way in
  uint64_t epoch_ = 0;
  double factor_ = 1;
  bool idle_ = false, stepping_ = false, alive_ = true, stalled_ = false, stopping_ = false;
  bool was_stalled_ = false;  // in the step that runs: its time is not made up for
};

}  // namespace kindred::live
