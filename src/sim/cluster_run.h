// One run of a cluster, in parts: cluster.cpp checks and drives it, cluster_flow.cpp follows requests as the router
// does, cluster_work.cpp runs the workers, cluster_experts.cpp their expert ranks, cluster_traces.cpp sends what
// engines say of themselves.
//
// Thread-safety: none. Private to the module.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "sim/cluster.h"
#include "sim/event_queue.h"
#include "sim/expert_load.h"
#include "sim/rank_flow.h"
#include "sim/sim_clock.h"

namespace kindred::sim {

class ClusterRun {
 public:
  ClusterRun(const ClusterOptions& options, std::span<const SimRequest> requests);
  Status start();           // Error: what the policies refuse
  Result<SimResult> run();  // Error: what the solver of a placement says

 private:
  enum class Kind : uint8_t { kArrival, kStepEnd, kFetched, kPoll, kProbe, kScript, kTrace, kTraceArrives };
  struct Event {
    Kind kind = Kind::kArrival;
    uint32_t at = 0;     // request, worker, line of the script, or trace on its way
    uint32_t epoch = 0;  // of the worker, or attempt of the request: an event of an earlier one is void
    uint32_t part = 0;   // unit or engine of the worker
  };

  // Engines that step together.
  struct Unit {
    uint32_t first = 0, last = 0;  // engines [first, last)
    ExpertUnion experts;
    bool busy = false;
    bool moving = false;  // no step runs: experts move
    // The step that runs:
    int64_t begin_ns = 0;
    uint32_t prefill = 0, decode = 0;
    double distinct = 0, worst = 0;
    std::vector<uint32_t> engine_prefill = {};
  };

  // What one engine tells, and when.
  struct Feed {
    uint64_t sequence = 0;
    int64_t pushed_ns = 0;
    int64_t due_ns = -1;                     // of the next one; -1: none
    bool changed = false;                    // since this moment began
    std::deque<uint64_t> received;           // dispatch ids, newest last
    uint32_t first_rank = 0, last_rank = 0;  // of experts: [first, last)
  };
  struct TraceOnItsWay {
    uint32_t worker = 0;
    fleet::EngineTrace trace;
  };

  struct Worker {
    const WorkerGroup* group = nullptr;
    fleet::WorkerId id = kNobody;  // in the fleet, once it has joined
    std::vector<Engine> engines;
    std::vector<Unit> units;
    std::vector<Feed> feeds;                               // of each engine
    std::unique_ptr<ExpertLoad> expert_load;               // null: one rank
    std::shared_ptr<const expert::RankMap> rank_map = {};  // what it tells routers; null: one rank
    std::unique_ptr<RankFlow> flow;                        // null: no WorkerGroup::expert_parallel
    std::optional<PlacementControl> control = {};
    std::optional<PlacementControl::Move> move = {};  // under way
    int64_t window_ends_ns = 0;
    bool alive = false;
    uint32_t epoch = 0;
    int64_t out_free_ns = 0, in_free_ns = 0;  // its two directions of the network
    int64_t alive_since_ns = 0, kv_seen_ns = 0;
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
  void start_direct(uint32_t at);
  Sequence sequence_of(uint32_t at) const;
  void token(uint32_t worker, const Emitted& emitted);
  void first_token(uint32_t at, uint32_t worker);
  void release_lease(uint32_t at);
  void end(uint32_t at, Ended how);
  bool refused(uint32_t at, fleet::WorkerId id);
  void lost_with(uint32_t at, uint32_t worker);
  void note(uint32_t at, bool decode, uint32_t worker);

  // cluster_work.cpp
  Worker make_worker(const WorkerGroup& group, uint32_t number, std::shared_ptr<const ExpertRanks> ranks) const;
  // `dispatch`: the router's name for the leg; 0: none.
  Place put(uint32_t worker, std::optional<uint32_t> engine, Sequence sequence, uint64_t dispatch);
  void kick(uint32_t worker) { kicked_.push_back(worker); }
  void begin_steps(uint32_t worker);
  void begin_step(uint32_t worker, uint32_t unit);
  bool plan_unit(uint32_t worker, Unit& unit);
  double step_s(Worker& worker, Unit& unit);
  void note_experts(Worker& worker, uint32_t engine, StepShape& shape);
  void end_step(uint32_t worker, uint32_t unit);
  void finish_result();
  void report_step(uint32_t worker, const Unit& unit);
  void begin_transfer(uint32_t at, uint32_t to);
  void fetched(uint32_t at);
  void measure_load(Worker& worker);
  void script(const ScriptEvent& event);
  void join(uint32_t worker);
  void fail(uint32_t worker);
  void poll();
  void probe();

  // cluster_experts.cpp
  Status place_experts(Worker& worker, const expert::ExpertShape& shape) const;
  double step_on_ranks_s(Worker& worker, Unit& unit);
  bool begin_move(uint32_t worker, uint32_t unit);  // false: nothing moves
  void end_move(Worker& worker, Unit& unit);

  // cluster_traces.cpp
  // An engine's state is another one: to be told as soon as allowed, and not before all of this moment has happened.
  void changed(uint32_t worker, uint32_t engine);
  void tell_changes();
  void tell_at(uint32_t worker, uint32_t engine, int64_t at_ns);
  void send_trace(uint32_t worker, uint32_t engine);
  void trace_arrives(uint32_t at);
  fleet::EngineTrace trace_of(Worker& worker, uint32_t engine);

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
  std::vector<StepShape> shapes_;  // scratch, of a unit's engines
  bool traces_ = false;            // somebody reads them
  std::vector<EnginePlace> changed_;
  std::vector<TraceOnItsWay> on_their_way_;
  std::vector<uint32_t> free_ways_;
  bool disaggregated_ = false;
  size_t ended_ = 0;
  std::optional<Error> failed_;
  SimResult result_;
};

}  // namespace kindred::sim
