// What all requests of one router share. The flows are functions of this and of one Exchange.
//
// Ownership: held by shared_ptr, since background tasks outlive the request that started them.
// Threads. The router has one io_context per thread, `loops`. The first is the control loop: what changes the fleet or
// the configuration and what looks after workers runs there (probers, pollers, watchers, reload, refit, /workers);
// background tasks do unless they say otherwise.
// Thread-safety: what is marked [control] is confined to the control loop; all else may be used on any loop's thread.
// No lock is held while anything waits.
#pragma once

#include <atomic>
#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/current.h"
#include "base/log.h"
#include "base/result.h"
#include "expert/cohorts.h"
#include "fleet/choose.h"
#include "fleet/fleet.h"
#include "fleet/room.h"
#include "fleet/worker_list.h"
#include "net/http_client.h"
#include "net/task.h"
#include "router/decision_log.h"
#include "router/loop.h"
#include "router/options.h"
#include "router/router_metrics.h"
#include "router/settings.h"
#include "router/trace_feed.h"
#include "router/vllm_priority.h"

namespace kindred::router {

class Gate;
class LeaseKeeper;
class ConfigSource;
class Edge;
class Experiment;
class History;
class Prefixes;
class Refitter;

// Which list brought a worker in.
enum class Origin { kConfig, kApi, kFile, kKubernetes };
std::string_view to_string(Origin origin);

class Core {
 public:
  // A loop for each of `executors`, of which there is at least one. Error: kInvalid for options that contradict each
  // other, or that of reading the cohort file.
  static Result<std::shared_ptr<Core>> make(std::span<const net::asio::any_io_executor> executors,
                                            RouterOptions options, const Clock& clock);
  ~Core();

  // [control] One worker more. A URL that was removed is restored, with its id. Error: kInvalid, naming `field` as
  // what is wrong: not a URL, known already, or one too many.
  Result<fleet::WorkerId> add_worker(const std::string& url, Role role, const std::string& field,
                                     std::optional<fleet::Dialect> dialect = {});
  // [control] It gets no more requests; those it has finish. Error: kInvalid or kNotFound, naming `url`.
  Result<fleet::WorkerId> remove_worker(const std::string& url);
  // [control] It stays a member and gets no more requests, until it is added again. Error: as above.
  Result<fleet::WorkerId> drain_worker(const std::string& url);
  void drop_worker(fleet::WorkerId id);  // [control]

  // Valid as long as the core is.
  const net::Endpoint& endpoint(fleet::WorkerId id) const;

  SettingsPtr settings() const { return settings_.get(); }
  void set_settings(SettingsPtr settings) { settings_.set(std::move(settings)); }  // [control]

  // Null: none. A refit puts another one here; a decision holds the one it began with.
  std::shared_ptr<const expert::CohortModel> cohorts() const { return cohorts_.get(); }
  void set_cohorts(std::shared_ptr<const expert::CohortModel> model) { cohorts_.set(std::move(model)); }  // [control]

  // A connection was refused or broke while a request needed it: the worker is out until a health
  // check, which is made at once, says otherwise.
  void worker_refused(fleet::WorkerId id, const std::string& why);
  // It was too slow, or broke off: a fault for its breaker.
  void worker_failed(fleet::WorkerId id, const std::string& why);
  // The head of its answer is there. 500, 502 and 504 are faults of its own; whatever else it says, it is alive.
  void worker_answered(fleet::WorkerId id, int status);
  // All of its answer is there.
  void worker_completed(fleet::WorkerId id) { fleet.report_completed(id); }

  // [control] Runs `task` beside everything else; it keeps the core alive. Returns false, and runs nothing, when
  // the router is closing or kMaxBackground tasks run already. `standing`: it ends only when the router
  // closes (or its worker has gone).
  static bool spawn(std::shared_ptr<Core> core, net::Task<void> task, bool standing = false);
  // The same on another loop, called on its thread or before listen().
  static bool spawn_on(Loop& loop, std::shared_ptr<Core> core, net::Task<void> task, bool standing = false);
  size_t background() const { return background_; }  // of all loops
  size_t standing() const { return standing_; }

  std::string new_request_id();
  size_t requests_in_flight() const;
  uint64_t new_room();  // in which two SGLang workers meet; 63 bits, as their server takes them

  struct Worker {
    net::Endpoint endpoint;
    std::shared_ptr<net::asio::steady_timer> pause;       // the prober's, between two checks
    bool probed = false;                                  // a prober runs
    std::shared_ptr<net::asio::steady_timer> poll_pause;  // the load poller's
    bool polled = false;
    std::string traces = {};      // where its engines' traces are read; empty: nowhere
    bool priority_asked = false;  // in this life of it (router/vllm_priority.h)
    Origin origin = Origin::kConfig;
  };

  std::deque<Loop> loops;                     // never more, never fewer
  const net::asio::any_io_executor executor;  // of the control loop
  const net::CancelSource closing;            // [control] that of the control loop
  const Clock& clock;
  const Logger log{"router"};
  fleet::Fleet fleet;
  fleet::DecodeRoom room;
  TraceFeed traces;                          // into the fleet
  Priorities priorities;                     // what vLLM workers make of them
  Current<fleet::EngineChoice> last_engine;  // the last decision of an engine policy, for status pages
  std::deque<Worker> workers;                // [control] by WorkerId; what is added moves nothing
  net::HttpClient export_client;             // [control] to the collector of traces
  net::HttpClient probe_client;              // [control] of its own: checks neither wait for requests nor break theirs
  std::unique_ptr<Experiment> experiment;    // null: none; the settings' policies refer to it
  std::map<size_t, std::vector<fleet::WantedWorker>> kubernetes_workers;  // [control] by the service's place
  std::unique_ptr<ConfigSource> config;  // null: there is none to read again; what it does is [control]
  std::shared_ptr<Refitter> refitter;    // null: off
  std::unique_ptr<Prefixes> prefixes;    // null: no policy asks what workers hold
  std::unique_ptr<History> history;      // null: none is kept of prompts' experts
  std::shared_ptr<LeaseKeeper> leases;
  std::shared_ptr<Gate> gate;  // places for requests
  RouterMetrics metrics;
  std::shared_ptr<Edge> edge;
  DecisionLog decisions;
  std::atomic<bool> draining{false};

 private:
  Core(std::span<const net::asio::any_io_executor> executors, const RouterOptions& options, const Clock& time);
  Result<fleet::WorkerId> member(const std::string& url) const;
  Status add_workers(const RouterOptions& options);
  Status load_cohorts(const RouterOptions& options);
  Status prepare_refit(const Settings& settings);
  Status prepare_policies(Settings& settings);
  static Status prepare_engines(Settings& settings);
  Status put_shadow(const policy::DecodePolicyOptions& of, std::unique_ptr<policy::DecodePolicy>& with_experts,
                    std::unique_ptr<policy::DecodePolicy>& without);
  Status prepare_prefixes(const Settings& settings);

  Current<Settings> settings_;
  Current<expert::CohortModel> cohorts_;
  // Guards the list against growing while another thread looks up a place in it; the control loop, which alone lets
  // it grow, needs none to read.
  mutable std::mutex workers_mutex_;
  std::atomic<size_t> background_{0}, standing_{0};
  const uint64_t id_seed_;
  std::atomic<uint64_t> ids_{0};
};

using CorePtr = std::shared_ptr<Core>;

// Runs `task` on that loop's thread, and goes on here.
net::Task<void> run_on(const Loop& loop, net::Task<void> task);

// Runs `work` on the control loop, and goes on with what it returned on the request's own, `here`.
template <class Work>
net::Task<std::invoke_result_t<Work>> on_control(Core& core, const Loop& here, Work work) {
  using Value = std::invoke_result_t<Work>;
  if (&here == &core.loops.front()) co_return work();
  std::optional<Value> value;
  const auto there = [](Work& job, std::optional<Value>& out) -> net::Task<void> {
    out.emplace(job());
    co_return;
  };
  co_await run_on(core.loops.front(), there(work, value));
  co_return *std::move(value);
}

// Parts of a core that are made from options, at its start and at each reload.
fleet::FleetOptions fleet_options(const RouterOptions& options);
using DecodePolicies = std::pair<std::unique_ptr<policy::DecodePolicy>, std::unique_ptr<policy::DecodePolicy>>;
std::shared_ptr<policy::DecodePolicy> lock(std::unique_ptr<policy::DecodePolicy> policy);
std::shared_ptr<policy::PrefillPolicy> lock(std::unique_ptr<policy::PrefillPolicy> policy);
// Null where the options want none.
Result<std::shared_ptr<policy::EnginePolicy>> make_engine_policy(const EngineOptions& options);
// The policy, and the one for workers whose experts are not known.
Result<DecodePolicies> make_decode_policies(const policy::DecodePolicyOptions& options);
// The workers that the options name, in their order; returns all that is wrong with them.
std::vector<Error> wanted_workers(const RouterOptions& options, std::vector<fleet::WantedWorker>& out);

inline constexpr size_t kMaxWorkers = 1024;
// Members and removed ones, whose records stay: about 1 KB each. Who comes back under its old URL and role
// adds none.
inline constexpr size_t kMaxWorkerRecords = 16 * kMaxWorkers;
// One prober and one poller per worker (a removed one's may still be ending), the loops that stand alone, and
// the calls that release and renew leases.
inline constexpr size_t kMaxBackground = 4096 + 4 * kMaxWorkers;

}  // namespace kindred::router
