// The workers: who they are, whether they are up, what each has in flight. State only: whoever polls
// and sends requests reports here, and policies read snapshots.
//
// Health. A worker is up once it has been described and a health check has succeeded. It is out after
// `failures_until_out` failed checks in a row, or at once when it refuses a connection or says that it
// does not serve; one successful check brings it back. Health never touches in-flight counts.
//
// Breaker. Requests that fail on a worker whose checks succeed take it out too (fleet/breaker.h). A check
// that succeeds closes the breaker only where one before it had failed: else it has proved nothing. However it
// was out, a worker comes back with a slow start: its load reads as (load + request) / share - request, so
// that it is chosen for `share` of what one that was never away would get.
//
// Load. What is in flight, in requests and in tokens, is counted by LoadGuards only, from the decision to the
// end of the leg. What engines say of themselves (LoadSource::kPolled) counts for `load_max_age_ms`, corrected
// by what has begun and ended here since; then it is unknown, which is not zero: the worker's own ledger is read
// instead.
//
// Engines. A worker has one or more data-parallel engines, whose state is kept one by one (fleet/engines.cpp): the
// latest trace that it pushed or that a poll found, and the ledger of what this router has sent there. A trace replaces
// what was known; what it does not include yet is added from the ledger. Traces are ordered by their sequence numbers
// within an epoch, and aged by this machine's clock, so that others' clocks do not matter.
//
// Experts. A decode leg may be taken with what its request is expected to use (fleet/expert_load.h); its guard keeps
// that among its worker's, and may tell how fast tokens came, from which step times are learnt (fleet/step_fit.h).
// Only snapshots that ask for it carry it.
//
// Membership. A draining worker gets no more requests and stays a member. A removed worker gets no more either,
// while those it has finish. Its record stays, with its
// id and its cohort, and restore() makes it a member again.
//
// Cohorts. Which row of the cohort model belongs to a worker is set from outside and survives health and
// membership: it is given back explicitly.
//
// Ownership: workers are never forgotten and ids never reused, so that views and guards stay valid.
// Thread-safety: all methods take one mutex; LoadGuards may be dropped on any thread.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "fleet/breaker.h"
#include "fleet/describe.h"
#include "fleet/engine_ledger.h"
#include "fleet/engine_trace.h"
#include "fleet/expert_load.h"
#include "fleet/load_report.h"
#include "fleet/step_fit.h"
#include "policy/engine_policy.h"
#include "policy/types.h"

namespace kindred::fleet {

using WorkerId = uint32_t;

// What one worker has in flight through this router.
struct Ledger {
  std::atomic<int64_t> requests{0};
  std::atomic<int64_t> tokens{0};  // as estimated when they were taken
  std::atomic<int64_t> probes{0};  // of them, those taken while the breaker was half-open
};

// What one leg adds to its worker.
struct LegLoad {
  int64_t requests = 1;  // choices
  int64_t tokens = 0;    // to be read and to be made
};

// The only owner of in-flight accounting: while it lives, its worker has `load` more.
class LoadGuard {
 public:
  LoadGuard() = default;
  LoadGuard(LoadGuard&& other) noexcept = default;
  LoadGuard& operator=(LoadGuard&& other) noexcept;
  ~LoadGuard() { release(); }

  void release();   // early; later calls do nothing
  void answered();  // the leg has begun to answer
  // It made so many tokens after the first of them, in that time.
  void decoded(uint64_t tokens, double seconds);
  // By which the engine tells that it has received the leg; 0: it was sent to a worker, not to one of its engines.
  uint64_t dispatch() const { return dispatch_; }

 private:
  friend class Fleet;
  LoadGuard(std::shared_ptr<Ledger> ledger, LegLoad load, bool probe);

  std::shared_ptr<Ledger> ledger_;  // null: released
  LegLoad load_;
  bool probe_ = false;
  std::shared_ptr<EngineLedger> engine_;  // null: none
  uint64_t dispatch_ = 0;
  std::shared_ptr<ExpertLoad> experts_;  // null: nothing is known of its experts
  std::shared_ptr<const expert::Inclusion> inclusion_;
  ExpertSums began_;  // of the worker, when it was taken
  std::shared_ptr<StepFit> steps_;
  uint32_t worker_ = 0;
};

struct EngineRef {
  WorkerId worker = 0;
  uint32_t rank = 0;
  bool operator==(const EngineRef&) const = default;
};

// kBoth is a worker that serves whole requests: any OpenAI-compatible server.
struct WorkerSpec {
  std::string url;
  Role role = Role::kBoth;
  std::optional<Dialect> dialect = {};  // as configured; none: found out
};

enum class Health { kUnknown, kUp, kDown };
std::string_view to_string(Health health);

// What policies read as a worker's load.
// kPressure: of the worker's engines, in tokens (policy/engine_policy.h): mean score over those with a fresh trace,
// with a share of KV added for what was sent since; the ledger's tokens where there is none.
enum class LoadSource { kRequests, kTokens, kPolled, kPressure };
std::string_view to_string(LoadSource source);
std::optional<LoadSource> parse_load_source(std::string_view name);  // "requests", "tokens", "polled", "pressure"

struct FleetOptions {
  uint32_t failures_until_out = 3;
  LoadSource load = LoadSource::kRequests;
  std::chrono::milliseconds load_max_age_ms{5'000};  // of a poll
  BreakerOptions breaker = {};
  std::chrono::milliseconds trace_max_age_ms{3'000};  // of an engine's trace: three heartbeats; an older one is late
  std::chrono::milliseconds trace_grace_ms{2'000};    // for so long; then it is unknown
  policy::PressureOptions pressure = {};              // of LoadSource::kPressure, and what status pages show
  uint64_t dispatch_seed = 1;                         // of dispatch ids: another one for each router
};

// What went wrong with a request, as far as its worker is concerned.
enum class Fault {
  kTransport,  // no answer in time, or one that broke off
  kAnswer,     // a whole answer that says the worker failed (500, 502, 504)
};

// A copy of an engine's state, for status pages and metrics.
struct EngineStatus {
  uint32_t rank = 0;
  policy::TraceState trace = policy::TraceState::kUnknown;
  double trace_age_s = -1;  // negative: there was none
  bool pushed = false;      // the last one came by itself, and was not asked for
  uint64_t sequence = 0;
  std::optional<double> skew_s = {};  // of its clock against ours when the last push came; includes the way here
  policy::EngineView view;            // what policies read
  policy::Pressure pressure;          // the terms of its score; the expert term against its worker's engines
  EngineLedger::Sums ledger;
};

// A copy of a worker's state, for status pages and metrics.
struct WorkerStatus {
  WorkerId id = 0;
  WorkerSpec spec;
  Health health = Health::kUnknown;
  std::string problem;  // why it is not up, or empty
  double state_age_s = 0;
  BreakerState breaker = BreakerState::kClosed;
  double share = 1;  // below 1: it starts slowly
  int64_t in_flight = 0;
  int64_t tokens_in_flight = 0;
  std::optional<LoadReport> load;  // the last one, while it is young enough
  double load_age_s = 0;           // of the last one; negative: there was none
  int32_t cohort = -1;
  bool removed = false;
  bool draining = false;
  Description description;  // without models while unknown
  std::vector<EngineStatus> engines = {};
};

struct Query {
  Role role = Role::kDecode;
  std::string_view model = {};             // empty: any
  std::string_view fingerprint = {};       // empty: any
  bool paired = false;                     // prefill: only those whose fingerprint some decode worker that is up has
  std::span<const WorkerId> exclude = {};  // tried already
  LegLoad load = {};                       // what the request adds to a worker's load
  std::optional<Dialect> dialect = {};     // none: any
  bool experts = false;                    // with what is known of workers' experts and steps
};

// All members of a role in configuration order, the unsuitable ones marked as not available.
struct Snapshot {
  std::vector<policy::WorkerView> views;
  std::vector<WorkerId> ids;  // beside them
  size_t available = 0;
  std::vector<std::shared_ptr<const ExpertState>> experts = {};    // which views refer to; empty unless asked for
  std::vector<std::shared_ptr<const expert::RankMap>> ranks = {};  // the same
};

// All engines of a role's members, in configuration order and by rank.
struct EngineSnapshot {
  std::vector<policy::EngineView> views;
  std::vector<EngineRef> engines;  // beside them
  size_t available = 0;
};

// What can be done for a model now.
struct Serving {
  bool known = false;  // some worker has said that it serves it
  size_t prefill_up = 0, decode_up = 0, plain_up = 0;
  bool paired = false;                         // a prefill and a decode worker with one fingerprint are up
  std::array<bool, kDialects> paired_by = {};  // the same, by their dialect
};

struct ServedModel {
  std::string id;
  uint64_t max_model_len_tokens = 0;  // 0: not said
  std::string parent = {};            // of a LoRA adapter: its base model
};

// What is known of one engine.
struct EngineState {
  std::shared_ptr<EngineLedger> ledger;  // not null
  std::optional<EngineLoad> load = {};   // of the latest trace or poll
  double expert_pressure = 0;
  MonotonicTime load_at{};
  bool pushed = false;
  uint64_t epoch = 0, sequence = 0;  // of the latest push
  std::optional<double> skew_s = {};
};

class Fleet {
 public:
  explicit Fleet(const Clock& clock, FleetOptions options = {}) : clock_(clock), options_(options) {}

  void set_options(const FleetOptions& options);  // for what comes from now on

  WorkerId add(WorkerSpec spec);
  void remove(WorkerId id);
  void drain(WorkerId id);
  void restore(WorkerId id);  // a removed one as if new: not reached yet; a draining one as it is
  bool removed(WorkerId id) const;

  size_t size() const;      // members
  size_t recorded() const;  // members and removed ones
  size_t count(Role role) const;
  std::string url(WorkerId id) const;
  Role role(WorkerId id) const;
  Health health(WorkerId id) const;
  Dialect dialect(WorkerId id) const;
  Description description(WorkerId id) const;

  // Gives the i-th decode worker cohort i, for i < `cohorts`, and the others none.
  void assign_cohorts(size_t cohorts);
  void set_cohort(WorkerId id, int32_t cohort);  // -1: none

  // What reports change is returned as true when the worker's health changed, for logs. What is reported of
  // a removed worker changes nothing.
  bool report_up(WorkerId id, Description description);
  // Where its experts are now, with expert parallelism; null: all on one rank, as at first.
  void report_ranks(WorkerId id, std::shared_ptr<const expert::RankMap> ranks);
  bool report_failure(WorkerId id, std::string why);  // one failed check
  bool report_out(WorkerId id, std::string why);      // a check says: draining, or of no use
  bool report_refused(WorkerId id, std::string why);  // a request found nobody there: out, and a fault

  // What requests met. Returns true when the breaker opened or closed, for logs. Answers alone (kAnswer) never
  // take out the last worker of its role that can be used: one request that no worker survives must not
  // empty the fleet.
  bool report_fault(WorkerId id, Fault fault);
  bool report_answered(WorkerId id);   // it began to answer, and not with a failure of its own
  bool report_completed(WorkerId id);  // the answer came whole

  // A poll's answer. One without counts changes nothing: what was known grows old.
  void report_load(WorkerId id, const LoadReport& load);

  // A trace that an engine pushed. False: ignored, since it is older than what is known, or of no engine that there is.
  bool report_trace(WorkerId id, const EngineTrace& trace);
  bool pushes_traces(EngineRef engine) const;  // its latest one was not asked for
  // What a poll that was sent at `asked` found, of all engines of the worker.
  void report_engines(WorkerId id, std::span<const EngineLoad> engines, MonotonicTime asked);

  [[nodiscard]] LoadGuard take(WorkerId id, LegLoad load);
  // `inclusion`: what its request is expected to use, as the decision said; null: not known.
  [[nodiscard]] LoadGuard take(WorkerId id, LegLoad load, std::shared_ptr<const expert::Inclusion> inclusion);
  // The same on one of its engines, where `prefill_tokens` are to be computed. A rank that there is not (any more)
  // counts for the worker alone.
  [[nodiscard]] LoadGuard take(EngineRef engine, LegLoad load, int64_t prefill_tokens);
  [[nodiscard]] LoadGuard take(WorkerId id, int64_t requests) { return take(id, LegLoad{.requests = requests}); }
  // What it adds to the load that policies read.
  double unit_of(LegLoad load) const;

  Snapshot snapshot(const Query& query) const;
  EngineSnapshot engine_snapshot(const Query& query) const;
  Serving serving(std::string_view model) const;
  // Models that some worker has named, once each, in order of configuration; up or not.
  std::vector<ServedModel> models() const;
  // Members, and the removed that still have requests in flight; or all that ever were.
  std::vector<WorkerStatus> status(bool all = false) const;
  WorkerStatus worker_status(WorkerId id) const;

 private:
  struct Worker {
    WorkerSpec spec;
    Health health = Health::kUnknown;
    std::string problem;
    MonotonicTime since;
    uint32_t failures = 0;     // in a row
    bool outage_seen = false;  // by a check, since it was last up
    int32_t cohort = -1;
    bool removed = false;
    bool draining = false;
    Description description;
    Breaker breaker;
    std::optional<LoadReport> load;  // the last that told counts
    MonotonicTime load_at;
    int64_t in_flight_then = 0;  // of this router, at that poll
    std::shared_ptr<Ledger> ledger = std::make_shared<Ledger>();
    std::shared_ptr<ExpertLoad> experts;  // not null
    std::vector<EngineState> engines;     // at least one
  };

  // fleet/engines.cpp
  void set_engines(Worker& worker, size_t engines);     // at least so many
  void resize_engines(Worker& worker, size_t engines);  // exactly so many, and never none
  policy::TraceState trace_state(const Worker& worker, const EngineState& engine, MonotonicTime now) const;
  policy::EngineView view_of(const Worker& worker, const EngineState& engine, MonotonicTime now) const;
  std::optional<double> pressure_load(const Worker& worker, MonotonicTime now) const;
  std::vector<EngineStatus> engine_status(const Worker& worker) const;

  bool set_health(Worker& worker, Health health, std::string problem);
  bool load_known(const Worker& worker, MonotonicTime now) const;
  double load_of(const Worker& worker, MonotonicTime now) const;
  double unit(LegLoad load) const;
  double requests_of(const Worker& worker, MonotonicTime now) const;
  bool usable(const Worker& worker, MonotonicTime now) const;
  bool decode_up(std::string_view model, std::string_view fingerprint, MonotonicTime now) const;
  bool suits(const Worker& worker, WorkerId id, const Query& query, MonotonicTime now) const;
  Worker& at(WorkerId id) const;
  WorkerStatus status_of(const Worker& worker, WorkerId id) const;

  const Clock& clock_;
  FleetOptions options_;
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Worker>> workers_;  // by id
  std::vector<WorkerId> members_;                 // ascending: decisions cost nothing for the removed
  uint64_t engines_made_ = 0;
  const std::shared_ptr<StepFit> steps_ = std::make_shared<StepFit>();
};

}  // namespace kindred::fleet
