// What all requests of one router share. The flows are functions of this and of one Exchange.
//
// Ownership: held by shared_ptr, since background tasks outlive the request that started them.
// Thread-safety: confined to the io_context's thread; clock and fleet are thread-safe by themselves.
#pragma once

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/log.h"
#include "base/result.h"
#include "expert/cohorts.h"
#include "fleet/fleet.h"
#include "fleet/room.h"
#include "fleet/worker_list.h"
#include "net/http_client.h"
#include "net/task.h"
#include "policy/decode_policy.h"
#include "policy/prefill_policy.h"
#include "router/decision_log.h"
#include "router/models.h"
#include "router/options.h"
#include "router/retry.h"
#include "router/router_metrics.h"

namespace kindred::router {

class Gate;
class LeaseKeeper;
class ConfigSource;
class Edge;
class Experiment;
class Prefixes;
class Refitter;

// Which list brought a worker in.
enum class Origin { kConfig, kApi, kFile, kKubernetes };
std::string_view to_string(Origin origin);

class Core {
 public:
  // Error: kInvalid for options that contradict each other, or that of reading the cohort file.
  static Result<std::shared_ptr<Core>> make(net::asio::any_io_executor executor, RouterOptions options,
                                            const Clock& clock);
  ~Core();

  // One worker more. A URL that was removed is restored, with its id. Error: kInvalid, naming `field` as
  // what is wrong: not a URL, known already, or one too many.
  Result<fleet::WorkerId> add_worker(const std::string& url, Role role, const std::string& field,
                                     std::optional<fleet::Dialect> dialect = {});
  // It gets no more requests; those it has finish. Error: kInvalid or kNotFound, naming `url`.
  Result<fleet::WorkerId> remove_worker(const std::string& url);
  // It stays a member and gets no more requests, until it is added again. Error: as above.
  Result<fleet::WorkerId> drain_worker(const std::string& url);
  void drop_worker(fleet::WorkerId id);

  // Valid as long as the core is.
  const net::Endpoint& endpoint(fleet::WorkerId id) const { return workers[id].endpoint; }

  // A connection was refused or broke while a request needed it: the worker is out until a health
  // check, which is made at once, says otherwise.
  void worker_refused(fleet::WorkerId id, const std::string& why);
  // It was too slow, or broke off: a fault for its breaker.
  void worker_failed(fleet::WorkerId id, const std::string& why);
  // The head of its answer is there. 500, 502 and 504 are faults of its own; whatever else it says, it is alive.
  void worker_answered(fleet::WorkerId id, int status);
  // All of its answer is there.
  void worker_completed(fleet::WorkerId id) { fleet.report_completed(id); }

  // Runs `task` beside everything else; it keeps the core alive. Returns false, and runs nothing, when
  // the router is closing or kMaxBackground tasks run already. `standing`: it ends only when the router
  // closes (or its worker has gone).
  static bool spawn(std::shared_ptr<Core> core, net::Task<void> task, bool standing = false);
  size_t background() const { return background_; }
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
    Origin origin = Origin::kConfig;
  };

  const net::asio::any_io_executor executor;
  RouterOptions options;  // replaced as a whole by a reload, between two requests' steps
  const Clock& clock;
  const Logger log{"router"};
  fleet::Fleet fleet;
  fleet::DecodeRoom room;
  std::deque<Worker> workers;  // by WorkerId; what is added moves nothing
  net::HttpClient client;
  net::HttpClient export_client;           // to the collector of traces
  net::HttpClient probe_client;            // of its own, so that checks neither wait for nor break request connections
  std::unique_ptr<Experiment> experiment;  // null: none; the policies below refer to it
  std::unique_ptr<policy::PrefillPolicy> prefill_policy;
  std::unique_ptr<policy::DecodePolicy> decode_policy;
  std::unique_ptr<policy::DecodePolicy> plain_policy;  // like decode_policy, of those that need no experts
  ModelAliases aliases;
  std::map<size_t, std::vector<fleet::WantedWorker>> kubernetes_workers;  // by the service's place in the options
  std::unique_ptr<ConfigSource> config;                                   // null: there is none to read again
  // Null: none. A refit puts another one here; a decision holds the one it began with.
  std::shared_ptr<const expert::CohortModel> cohorts;
  std::shared_ptr<Refitter> refitter;  // null: off
  std::unique_ptr<Prefixes> prefixes;  // null: no policy asks what workers hold
  std::shared_ptr<LeaseKeeper> leases;
  std::shared_ptr<Gate> gate;  // places for requests
  RetryStatuses retry_on;      // answers of a worker after which another one is asked
  RouterMetrics metrics;
  std::shared_ptr<Edge> edge;
  DecisionLog decisions;
  net::CancelSource closing;  // ends the background tasks
  bool draining = false;

 private:
  Core(net::asio::any_io_executor with, RouterOptions given, const Clock& time);
  Result<fleet::WorkerId> member(const std::string& url) const;
  Status add_workers();
  Status load_cohorts();
  Status prepare_refit();
  Status prepare_policies();
  Status prepare_prefixes();

  size_t background_ = 0, standing_ = 0;
  uint64_t id_seed_ = 0;
  uint64_t ids_ = 0;
};

using CorePtr = std::shared_ptr<Core>;

// Parts of a core that are made from options, at its start and at each reload.
fleet::FleetOptions fleet_options(const RouterOptions& options);
using DecodePolicies = std::pair<std::unique_ptr<policy::DecodePolicy>, std::unique_ptr<policy::DecodePolicy>>;
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
