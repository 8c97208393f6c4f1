#include "cli/local_cluster.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <thread>

#include "cli/chat_load.h"

namespace kindred::cli {

namespace {
constexpr auto kReadyTimeout = std::chrono::seconds(60);
constexpr auto kReadyPoll = std::chrono::milliseconds(30);
}  // namespace

Result<LocalCluster::Server> LocalCluster::launch(const std::string& name, uint16_t port, std::vector<std::string> args,
                                                  const std::string& ready_path) {
  if (port == 0) {
    const Result<uint16_t> free = free_port();
    if (!free) return free.error();
    port = *free;
  }
  args.insert(args.end(), {"--port", std::to_string(port)});
  Result<Child> child = Child::start(args, fmt::format("{}/{}.log", plan_.log_dir, name));
  if (!child) return std::move(child).error();
  servers_.push_back({name, net::Endpoint{"127.0.0.1", port}, ready_path, std::move(*child)});
  return servers_.size() - 1;
}

Status LocalCluster::wait_ready() {
  const auto give_up = std::chrono::steady_clock::now() + kReadyTimeout;
  for (Process& server : servers_) {
    while (!server.ready && !fetch(server.endpoint, server.ready_path).ok()) {
      const bool dead = !server.child || !server.child->running();
      if (dead || std::chrono::steady_clock::now() > give_up) {
        const std::string tail = server.child ? server.child->log_tail() : "";
        return Error{ErrorCode::kUnavailable,
                     fmt::format("{} {}:\n{}", server.name, dead ? "stopped" : "does not answer", tail)};
      }
      std::this_thread::sleep_for(kReadyPoll);
    }
    server.ready = true;
  }
  return {};
}

Result<LocalCluster::Server> LocalCluster::launch_worker(const std::string& name, const std::string& role) {
  // One thread each: the workers share the machine's cores, and more would only contend.
  std::vector<std::string> args = {"worker", "--model", plan_.model, "--role", role, "--threads", "1"};
  args.insert(args.end(), plan_.worker_args.begin(), plan_.worker_args.end());
  if (role == "decode") args.insert(args.end(), {"--peer", prefill().url()});
  return launch(name, 0, std::move(args), "/health");
}

Result<LocalCluster::Server> LocalCluster::launch_router(const std::string& name, uint16_t port,
                                                         const std::vector<std::string>& args) {
  std::vector<std::string> all = {"router", "--prefill", prefill().url()};
  for (const net::Endpoint& worker : decode()) all.insert(all.end(), {"--decode", worker.url()});
  all.insert(all.end(), args.begin(), args.end());
  return launch(name, port, std::move(all), "/ready");
}

Result<LocalCluster> LocalCluster::start(const ClusterPlan& plan) {
  LocalCluster cluster(plan);
  Result<Server> launched = cluster.launch_worker("prefill", "prefill");
  for (uint32_t i = 0; launched && i < plan.decode_workers; ++i) {
    launched = cluster.launch_worker(fmt::format("decode {}", i), "decode");
  }
  if (!launched) return std::move(launched).error();
  if (Status ready = cluster.wait_ready(); !ready) return std::move(ready).error();
  return cluster;
}

LocalCluster::~LocalCluster() {
  while (!servers_.empty()) servers_.pop_back();
}

std::vector<net::Endpoint> LocalCluster::decode() const {
  std::vector<net::Endpoint> endpoints;
  for (size_t i = 1; i <= plan_.decode_workers && i < servers_.size(); ++i) endpoints.push_back(servers_[i].endpoint);
  return endpoints;
}

std::optional<std::string> LocalCluster::dead() {
  for (Process& server : servers_) {
    if (server.child && !server.child->running()) return server.name;
  }
  return std::nullopt;
}

void LocalCluster::stop(Server server) { servers_[server].child.reset(); }

DecodeWork& DecodeWork::operator+=(const DecodeWork& other) {
  for (const auto& [batch, steps] : other.by_batch) {
    by_batch[batch].steps += steps.steps;
    by_batch[batch].active_experts += steps.active_experts;
  }
  sequences += other.sequences;
  prompt_tokens += other.prompt_tokens;
  paced_steps += other.paced_steps;
  pace_overruns += other.pace_overruns;
  return *this;
}

DecodeWork operator-(DecodeWork a, const DecodeWork& b) {
  DecodeWork negative;
  for (const auto& [batch, steps] : b.by_batch) negative.by_batch[batch] = {-steps.steps, -steps.active_experts};
  negative.sequences = -b.sequences;
  negative.prompt_tokens = -b.prompt_tokens;
  negative.paced_steps = -b.paced_steps;
  negative.pace_overruns = -b.pace_overruns;
  return a += negative;
}

DecodeWork::Steps DecodeWork::all() const {
  Steps sum;
  for (const auto& [batch, steps] : by_batch) {
    sum.steps += steps.steps;
    sum.active_experts += steps.active_experts;
  }
  return sum;
}

double DecodeWork::active_per_step() const {
  const Steps sum = all();
  return sum.steps > 0 ? sum.active_experts / sum.steps : 0;
}

double DecodeWork::batch() const {
  const double steps = all().steps;
  return steps > 0 ? sequences / steps : 0;
}

double active_change(const DecodeWork& base, const DecodeWork& other) {
  double ours = 0, theirs = 0;
  for (const auto& [batch, a] : base.by_batch) {
    const auto found = other.by_batch.find(batch);
    if (found == other.by_batch.end() || a.steps <= 0 || found->second.steps <= 0) continue;
    const DecodeWork::Steps& b = found->second;
    const double weight = std::min(a.steps, b.steps);
    theirs += weight * a.active_experts / a.steps;
    ours += weight * b.active_experts / b.steps;
  }
  return theirs > 0 ? ours / theirs - 1 : std::numeric_limits<double>::quiet_NaN();
}

Result<DecodeWork> decode_work(const LocalCluster& cluster) {
  DecodeWork total;
  for (const net::Endpoint& worker : cluster.decode()) {
    const Result<std::string> text = fetch(worker, "/metrics");
    if (!text) return text.error();
    DecodeWork work;
    for (const auto& [batch, steps] : metric_by_label(*text, "kindred_decode_steps_total", "sequences")) {
      work.by_batch[static_cast<uint32_t>(std::strtoul(batch.c_str(), nullptr, 10))].steps += steps;
    }
    for (const auto& [batch, active] : metric_by_label(*text, "kindred_decode_active_experts_total", "sequences")) {
      work.by_batch[static_cast<uint32_t>(std::strtoul(batch.c_str(), nullptr, 10))].active_experts += active;
    }
    work.sequences = metric_sum(*text, "kindred_decode_sequences_total");
    work.prompt_tokens = metric_sum(*text, "kindred_prompt_tokens_evaluated_total");
    work.paced_steps = metric_sum(*text, "kindred_paced_steps_total");
    work.pace_overruns = metric_sum(*text, "kindred_pace_overruns_total");
    total += work;
  }
  return total;
}

std::string find_root() {
  std::error_code error;
  std::filesystem::path at = std::filesystem::read_symlink("/proc/self/exe", error);
  while (!error && at.has_relative_path()) {
    at = at.parent_path();
    if (std::filesystem::exists(at / "models/kindred-tiny-moe-q8_0.gguf", error)) return at.string();
  }
  return ".";
}

}  // namespace kindred::cli
