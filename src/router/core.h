// What all requests of one router share. The flows are functions of this and of one Exchange.
//
// Ownership: held by shared_ptr, since background tasks outlive the request that started them.
// Thread-safety: confined to the io_context's thread; clock and fleet are thread-safe by themselves.
#pragma once

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/log.h"
#include "base/result.h"
#include "expert/cohorts.h"
#include "fleet/fleet.h"
#include "net/http_client.h"
#include "net/task.h"
#include "policy/decode_policy.h"
#include "policy/prefill_policy.h"
#include "router/decision_log.h"
#include "router/options.h"
#include "router/router_metrics.h"

namespace kindred::router {

class Core {
 public:
  // Error: kInvalid for options that contradict each other, or that of reading the cohort file.
  static Result<std::shared_ptr<Core>> make(net::asio::any_io_executor executor, RouterOptions options,
                                            const Clock& clock);

  const net::Endpoint& endpoint(fleet::WorkerId id) const { return workers[id].endpoint; }

  // A connection was refused or broke while a request needed it: the worker is out until a health
  // check, which is made at once, says otherwise.
  void worker_refused(fleet::WorkerId id, const std::string& why);

  // Runs `task` beside everything else; it keeps the core alive. Returns false, and runs nothing, when
  // the router is closing or kMaxBackground tasks run already.
  static bool spawn(std::shared_ptr<Core> core, net::Task<void> task);
  size_t background() const { return background_; }

  std::string new_request_id();

  struct Worker {
    net::Endpoint endpoint;
    std::shared_ptr<net::asio::steady_timer> pause;  // the prober's, between two checks
  };

  const net::asio::any_io_executor executor;
  const RouterOptions options;
  const Clock& clock;
  const Logger log{"router"};
  fleet::Fleet fleet;
  std::vector<Worker> workers;  // by WorkerId
  net::HttpClient client;
  net::HttpClient probe_client;  // of its own, so that checks neither wait for nor break request connections
  std::unique_ptr<policy::PrefillPolicy> prefill_policy;
  std::unique_ptr<policy::DecodePolicy> decode_policy;
  std::unique_ptr<policy::DecodePolicy> plain_policy;  // like decode_policy, of those that need no experts
  std::optional<expert::CohortModel> cohorts;
  RouterMetrics metrics;
  DecisionLog decisions;
  net::CancelSource closing;  // ends the background tasks
  size_t requests_in_flight = 0;
  bool draining = false;

 private:
  Core(net::asio::any_io_executor with, RouterOptions given, const Clock& time);
  Status add_workers();
  Status load_cohorts();

  size_t background_ = 0;
  uint64_t id_seed_ = 0;
  uint64_t ids_ = 0;
};

using CorePtr = std::shared_ptr<Core>;

inline constexpr size_t kMaxWorkers = 1024;
inline constexpr size_t kMaxBackground = 4096 + kMaxWorkers;  // one prober per worker, and lease releases

}  // namespace kindred::router
