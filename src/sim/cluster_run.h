// One run of a cluster, in parts: cluster.cpp checks and drives it, cluster_flow.cpp follows requests as the router
// does, cluster_work.cpp runs the workers.
//
// Thread-safety: none. Private to the module.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "sim/cluster.h"
#include "sim/event_queue.h"
#include "sim/sim_clock.h"

namespace kindred::sim {

class ClusterRun {
 public:
  ClusterRun(const ClusterOptions& options, std::span<const SimRequest> requests);
  Status start();  // Error: what the policies refuse
  SimResult run();

 private:
  enum class Kind : uint8_t { kArrival, kStepEnd, kFetched, kPoll, kProbe, kScript };
  struct Event {
    Kind kind = Kind::kArrival;
    uint32_t at = 0;     // request, worker or line of the script
    uint32_t epoch = 0;  // of the worker, or attempt of the request: an event of an earlier one is void
  };

  struct Worker {
    const WorkerGroup* group = nullptr;
    fleet::WorkerId id = kNobody;  // in the fleet, once it has joined
    std::vector<Engine> engines;
    ExpertUnion experts;
    bool alive = false, busy = false;
    uint32_t epoch = 0;
    int64_t out_free_ns = 0, in_free_ns = 0;  // its two directions of the network
    int64_t alive_since_ns = 0, kv_seen_ns = 0;
    // The step that runs:
    int64_t step_begin_ns = 0;
    uint32_t step_prefill = 0, step_decode = 0;
    double step_experts = 0, step_worst = 0;
    WorkerReport report;
  };

  enum class Phase : uint8_t { kNotYet, kPrefill, kHanded, kDecoding, kWhole, kDone };
  struct Place {
    uint32_t worker = kNobody, engine = 0, slot = 0;
  };
  struct Request {
    Phase phase = Phase::kNotYet;
    bool leased = false;   // its KV is at the prefill worker
    bool fetched = false;  // and at the decode worker
    uint32_t attempt = 0;
    int64_t decode_first_ns = 0;  // its decode worker's first token
    Place prefill, decode;
    Routed routed;
    std::vector<uint64_t> pieces;  // chained hashes
  };

  // cluster_flow.cpp
  void arrive(uint32_t at);
  void start_prefill(uint32_t at);
  void start_decode(uint32_t at);
  void start_whole(uint32_t at);
  void token(uint32_t worker, const Emitted& emitted);
  void first_token(uint32_t at, uint32_t worker);
  void release_lease(uint32_t at);
  void end(uint32_t at, Ended how);
  bool refused(uint32_t at, fleet::WorkerId id);
  void lost_with(uint32_t at, uint32_t worker);
  void note(uint32_t at, bool decode, uint32_t worker);

  // cluster_work.cpp
  Place put(uint32_t worker, const Sequence& sequence);
  void kick(uint32_t worker) { kicked_.push_back(worker); }
  void begin_step(uint32_t worker);
  void end_step(uint32_t worker);
  void begin_transfer(uint32_t at, uint32_t to);
  void fetched(uint32_t at);
  void measure_kv(Worker& worker);
  void script(const ScriptEvent& event);
  void join(uint32_t worker);
  void fail(uint32_t worker);
  void poll();
  void probe();

  void handle(const Event& event);
  void push(int64_t at_ns, Event event) { queue_.push(at_ns, event); }
  Dispatcher& router(uint32_t request) { return *routers_[request % routers_.size()]; }
  bool all_ended() const { return ended_ == requests_.size(); }

  const ClusterOptions& options_;
  const std::span<const SimRequest> given_;
  SimClock clock_;
  EventQueue<Event> queue_;
  std::vector<std::unique_ptr<Dispatcher>> routers_;
  std::vector<Worker> workers_;
  std::vector<uint32_t> worker_of_;  // by fleet id
  std::vector<Request> requests_;
  std::vector<uint32_t> kicked_;   // may have something to do
  std::vector<uint32_t> fetches_;  // scratch
  std::vector<Emitted> emitted_;   // scratch
  std::vector<StepShape> shapes_;  // scratch
  bool disaggregated_ = false;
  size_t ended_ = 0;
  SimResult result_;
};

}  // namespace kindred::sim
