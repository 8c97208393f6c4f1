#include "cli/demo_cluster.h"

#include <fmt/format.h>

#include <chrono>
#include <thread>

#include "cli/chat_load.h"

namespace kindred::cli {

namespace {
constexpr auto kReadyTimeout = std::chrono::seconds(60);
constexpr auto kReadyPoll = std::chrono::milliseconds(30);
}  // namespace

Result<DemoCluster::Server> DemoCluster::launch(const std::string& name, uint16_t port, std::vector<std::string> args,
                                                const ClusterPlan& plan) {
  if (port == 0) {
    const Result<uint16_t> free = free_port();
    if (!free) return free.error();
    port = *free;
  }
  args.insert(args.end(), {"--port", std::to_string(port)});
  Result<Child> child = Child::start(args, fmt::format("{}/{}.log", plan.log_dir, name));
  if (!child) return std::move(child).error();
  return Server{name, net::Endpoint{"127.0.0.1", port}, std::move(*child)};
}

Status DemoCluster::wait_ready(Server& server, const std::string& path) {
  const auto give_up = std::chrono::steady_clock::now() + kReadyTimeout;
  while (!fetch(server.endpoint, path).ok()) {
    const bool dead = !server.child->running();
    if (dead || std::chrono::steady_clock::now() > give_up) {
      return Error{ErrorCode::kUnavailable, fmt::format("{} {}:\n{}", server.name, dead ? "stopped" : "does not answer",
                                                        server.child->log_tail())};
    }
    std::this_thread::sleep_for(kReadyPoll);
  }
  return {};
}

std::vector<std::string> DemoCluster::worker_args(const ClusterPlan& plan, const std::string& role) {
  // One thread each: the workers share the machine's cores, and more would only contend.
  return {"worker", "--model", plan.model, "--role", role, "--threads", "1"};
}

std::vector<std::string> DemoCluster::router_args(const std::string& policy) const {
  std::vector<std::string> args = {"router", "--decode-policy", policy, "--prefill", prefill_.endpoint.url()};
  for (const Server& worker : decode_) args.insert(args.end(), {"--decode", worker.endpoint.url()});
  return args;
}

Status DemoCluster::start_workers(const ClusterPlan& plan) {
  Result<Server> prefill = launch("prefill", 0, worker_args(plan, "prefill"), plan);
  if (!prefill) return std::move(prefill).error();
  prefill_ = std::move(*prefill);
  for (uint32_t i = 0; i < plan.decode_workers; ++i) {
    std::vector<std::string> args = worker_args(plan, "decode");
    args.insert(args.end(), {"--peer", prefill_.endpoint.url()});
    Result<Server> worker = launch(fmt::format("decode {}", i), 0, std::move(args), plan);
    if (!worker) return std::move(worker).error();
    decode_.push_back(std::move(*worker));
  }
  Result<Server> single = launch("single", 0, worker_args(plan, "both"), plan);
  if (!single) return std::move(single).error();
  single_ = std::move(*single);

  if (Status ready = wait_ready(prefill_, "/health"); !ready) return ready;
  for (Server& worker : decode_) {
    if (Status ready = wait_ready(worker, "/health"); !ready) return ready;
  }
  return wait_ready(single_, "/health");
}

Status DemoCluster::start_routers(const ClusterPlan& plan) {
  std::vector<std::string> args = router_args("locality-band");
  // tau 0: no second-nearest worker joins a band of one. Among three workers it would be a third of the
  // cluster, and similar requests would be spread over two workers of three.
  args.insert(args.end(), {"--cohorts", plan.cohorts, "--tau", "0"});
  Result<Server> router = launch("router", plan.router_port, std::move(args), plan);
  if (!router) return std::move(router).error();
  router_ = std::move(*router);
  Result<Server> baseline = launch("round-robin router", 0, router_args("round-robin"), plan);
  if (!baseline) return std::move(baseline).error();
  baseline_ = std::move(*baseline);
  if (Status ready = wait_ready(router_, "/ready"); !ready) return ready;
  return wait_ready(baseline_, "/ready");
}

Result<DemoCluster> DemoCluster::start(const ClusterPlan& plan) {
  DemoCluster cluster;
  if (Status started = cluster.start_workers(plan); !started) return std::move(started).error();
  if (Status started = cluster.start_routers(plan); !started) return std::move(started).error();
  return cluster;
}

std::vector<net::Endpoint> DemoCluster::decode() const {
  std::vector<net::Endpoint> endpoints;
  endpoints.reserve(decode_.size());
  for (const Server& worker : decode_) endpoints.push_back(worker.endpoint);
  return endpoints;
}

std::optional<std::string> DemoCluster::dead() {
  const auto died = [](Server& server) { return server.child && !server.child->running(); };
  for (Server* server : {&prefill_, &router_}) {
    if (died(*server)) return server->name;
  }
  for (Server& worker : decode_) {
    if (died(worker)) return worker.name;
  }
  return std::nullopt;
}

void DemoCluster::keep_only_the_cluster() {
  baseline_.child.reset();
  single_.child.reset();
}

}  // namespace kindred::cli
