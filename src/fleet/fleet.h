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
#include "fleet/load_report.h"
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

  void release();  // early; later calls do nothing

 private:
  friend class Fleet;
  LoadGuard(std::shared_ptr<Ledger> ledger, LegLoad load, bool probe);

  std::shared_ptr<Ledger> ledger_;  // null: released
  LegLoad load_;
  bool probe_ = false;
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
enum class LoadSource { kRequests, kTokens, kPolled };
std::string_view to_string(LoadSource source);
std::optional<LoadSource> parse_load_source(std::string_view name);  // "requests", "tokens", "polled"

struct FleetOptions {
  uint32_t failures_until_out = 3;
  LoadSource load = LoadSource::kRequests;
  std::chrono::milliseconds load_max_age_ms{5'000};  // of a poll
  BreakerOptions breaker = {};
};

// What went wrong with a request, as far as its worker is concerned.
enum class Fault {
  kTransport,  // no answer in time, or one that broke off
  kAnswer,     // a whole answer that says the worker failed (500, 502, 504)
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
};

struct Query {
  Role role = Role::kDecode;
  std::string_view model = {};             // empty: any
  std::string_view fingerprint = {};       // empty: any
  bool paired = false;                     // prefill: only those whose fingerprint some decode worker that is up has
  std::span<const WorkerId> exclude = {};  // tried already
  LegLoad load = {};                       // what the request adds to a worker's load
  std::optional<Dialect> dialect = {};     // none: any
};

// All members of a role in configuration order, the unsuitable ones marked as not available.
struct Snapshot {
  std::vector<policy::WorkerView> views;
  std::vector<WorkerId> ids;  // beside them
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
  Description description(WorkerId id) const;

  // Gives the i-th decode worker cohort i, for i < `cohorts`, and the others none.
  void assign_cohorts(size_t cohorts);
  void set_cohort(WorkerId id, int32_t cohort);  // -1: none

  // What reports change is returned as true when the worker's health changed, for logs. What is reported of
  // a removed worker changes nothing.
  bool report_up(WorkerId id, Description description);
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

  [[nodiscard]] LoadGuard take(WorkerId id, LegLoad load);
  [[nodiscard]] LoadGuard take(WorkerId id, int64_t requests) { return take(id, LegLoad{.requests = requests}); }
  // What it adds to the load that policies read.
  double unit_of(LegLoad load) const;

  Snapshot snapshot(const Query& query) const;
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
  };

  bool set_health(Worker& worker, Health health, std::string problem);
  bool load_known(const Worker& worker, MonotonicTime now) const;
  double load_of(const Worker& worker, MonotonicTime now) const;
  double unit(LegLoad load) const;
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
};

}  // namespace kindred::fleet
