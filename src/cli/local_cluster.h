// Clusters of real processes of this program on 127.0.0.1, for the demo and the benches.
//
// Thread-safety: none.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"
#include "cli/process.h"
#include "net/http_message.h"

namespace kindred::cli {

struct ClusterPlan {
  std::string model;  // GGUF
  std::string log_dir;
  uint32_t decode_workers = 3;
  std::vector<std::string> worker_args = {};  // of every worker, beside --model and --role
};

// One prefill worker, some decode workers, and whatever routers and further workers are launched over
// them. All stop with the cluster, the last launched first: routers before the workers they watch.
class LocalCluster {
 public:
  using Server = size_t;

  // Returns when every worker answers. Errors name the process and quote its last lines.
  static Result<LocalCluster> start(const ClusterPlan& plan);
  // Without workers; only launch() may be used, since the others refer to them.
  static LocalCluster empty(const std::string& log_dir) { return LocalCluster(ClusterPlan{{}, log_dir, 0, {}}); }
  LocalCluster(LocalCluster&&) = default;
  LocalCluster& operator=(LocalCluster&&) = delete;
  ~LocalCluster();

  // `port` 0: a free one. Whoever launches calls wait_ready() before use.
  Result<Server> launch_router(const std::string& name, uint16_t port, const std::vector<std::string>& args);
  Result<Server> launch_worker(const std::string& name, const std::string& role);
  // Any command of this program that takes --port; it is up once it answers `ready_path`.
  Result<Server> launch(const std::string& name, uint16_t port, std::vector<std::string> args,
                        const std::string& ready_path);
  Status wait_ready();

  const net::Endpoint& endpoint(Server server) const { return servers_[server].endpoint; }
  const net::Endpoint& prefill() const { return servers_[0].endpoint; }
  std::vector<net::Endpoint> decode() const;

  // The name of a process that has died, if any has.
  std::optional<std::string> dead();
  void stop(Server server);

 private:
  struct Process {
    std::string name;
    net::Endpoint endpoint;
    std::string ready_path;
    std::optional<Child> child;  // none: stopped on purpose
    bool ready = false;
  };

  explicit LocalCluster(ClusterPlan plan) : plan_(std::move(plan)) {}

  ClusterPlan plan_;
  std::vector<Process> servers_;  // prefill, decode workers, then the others
};

// What the decode workers did, as their metrics count it: totals, or the difference of two.
struct DecodeWork {
  struct Steps {
    double steps = 0, active_experts = 0;
  };
  std::map<uint32_t, Steps> by_batch;  // decoding sequences -> steps with so many
  double sequences = 0, prompt_tokens = 0;
  double paced_steps = 0, pace_overruns = 0;

  Steps all() const;
  double active_per_step() const;  // and layer
  double batch() const;            // mean
  double overrun_share() const { return paced_steps > 0 ? pace_overruns / paced_steps : 0; }
  DecodeWork& operator+=(const DecodeWork& other);
};
DecodeWork operator-(DecodeWork a, const DecodeWork& b);

// By how much `other` touches more experts a step and layer than `base` (-0.1: 10 % fewer) in steps of
// equal batch size: each size that both have counts as often as the one that has it less. What the
// policies do to batch sizes, or the machine, is thereby left out. NaN: no size in common.
double active_change(const DecodeWork& base, const DecodeWork& other);

// Of all decode workers together, so far.
Result<DecodeWork> decode_work(const LocalCluster& cluster);

// The checkout (or installation) this binary belongs to: the nearest folder above it with our models;
// "." if there is none.
std::string find_root();

}  // namespace kindred::cli
