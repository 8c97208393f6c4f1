// The demo's cluster: real processes of this program on 127.0.0.1.
//
// Thread-safety: none.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"
#include "cli/process.h"
#include "net/http_message.h"

namespace kindred::cli {

struct ClusterPlan {
  std::string model;    // GGUF
  std::string cohorts;  // cohort file
  std::string log_dir;
  uint16_t router_port = 8000;
  uint32_t decode_workers = 3;
};

// One prefill worker and some decode workers, one worker that does both (the reference for outputs),
// and two routers over the same workers: one by locality, one round-robin.
class DemoCluster {
 public:
  // Returns when every process answers. Errors name the process and quote its last lines.
  static Result<DemoCluster> start(const ClusterPlan& plan);

  const net::Endpoint& locality_router() const { return router_.endpoint; }
  const net::Endpoint& round_robin_router() const { return baseline_.endpoint; }
  const net::Endpoint& prefill() const { return prefill_.endpoint; }
  const net::Endpoint& single() const { return single_.endpoint; }
  std::vector<net::Endpoint> decode() const;

  // The name of a process that has died, if any has.
  std::optional<std::string> dead();
  // The reference worker and the baseline router are not needed once all is measured.
  void keep_only_the_cluster();

 private:
  struct Server {
    std::string name;
    net::Endpoint endpoint;
    std::optional<Child> child;
  };

  DemoCluster() = default;
  static Result<Server> launch(const std::string& name, uint16_t port, std::vector<std::string> args,
                               const ClusterPlan& plan);
  static Status wait_ready(Server& server, const std::string& path);
  static std::vector<std::string> worker_args(const ClusterPlan& plan, const std::string& role);
  std::vector<std::string> router_args(const std::string& policy) const;
  Status start_workers(const ClusterPlan& plan);
  Status start_routers(const ClusterPlan& plan);

  // Destroyed last to first: routers stop before the workers they watch.
  Server prefill_;
  std::vector<Server> decode_;
  Server single_, baseline_, router_;
};

}  // namespace kindred::cli
