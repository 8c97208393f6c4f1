// `kindred worker`: loads a model and serves it until told to stop.
#include <fmt/format.h>
#include <unistd.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/signal_set.hpp>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/config.h"
#include "cli/commands.h"
#include "cli/openmp.h"
#include "cli/terminal.h"
#include "engine/engine.h"
#include "engine/engine_set.h"
#include "engine/expert_controller.h"
#include "engine/expert_ranks.h"
#include "engine/memory.h"
#include "engine/model.h"
#include "engine/rank_topology.h"
#include "engine/worker.h"

namespace kindred::cli {
namespace {

namespace asio = net::asio;
using net::Task;

struct WorkerArguments {
  std::string model;
  std::string role = "both";
  std::string host = "127.0.0.1";
  int64_t port = 8100;
  std::string name = "w0";
  std::string served_model_name;
  std::vector<std::string> peer;
  int64_t context_tokens = 4096, kv_tokens = 16384, sequences = 64, token_budget = 512, block_tokens = 16;
  bool prefix_cache = true;
  int64_t threads = 0;
  int64_t data_parallel_size = 1, traces_port = -1;
  std::string queue_policy = "fcfs", kv_admission = "reserve";
  int64_t queue_age_ms = 5000;
  int64_t expert_moves_per_step = 1, expert_window_ms = 10'000;
  std::string expert_ranks = "0", expert_placement = "static", expert_solver = "flow", expert_pinning = "auto";
  std::string pace;
  int64_t lease_bytes = 1LL << 30, lease_ttl_ms = 30'000, body_bytes = 64LL << 20;
  int64_t drain_ms = 10'000;
};

std::vector<std::string> queue_policies() {
  const auto names = policy::queue_policy_names();
  return {names.begin(), names.end()};
}

ConfigSchema schema_of(WorkerArguments& o) {
  ConfigSchema schema("worker --model MODEL.gguf [OPTIONS]",
                      "Serves a GGUF model over OpenAI's API, or one leg of requests for a Kindred router.");
  schema.text("model", &o.model, "GGUF file (required)");
  schema.choice("role", &o.role, {"prefill", "decode", "both"}, "what this worker does; both also serves clients");
  schema.text("host", &o.host, "address to listen on");
  schema.integer("port", &o.port, 0, 65535, "port to listen on; 0 takes a free one");
  schema.text("name", &o.name, "name in messages");
  schema.text("served_model_name", &o.served_model_name, "the model's name for clients; default: the GGUF's own");
  schema.list("peer", &o.peer, "prefill worker whose KV this one may pull (decode, both)");
  schema.integer("context_tokens", &o.context_tokens, 2, 1 << 30, "longest prompt and output together");
  schema.integer("kv_tokens", &o.kv_tokens, 2, 1 << 30,
                 "KV cells of an engine, shared by all its sequences and its prefix cache");
  schema.integer("sequences", &o.sequences, 1, 255, "sequences evaluated at once");
  schema.integer("token_budget", &o.token_budget, 1, 1 << 20, "tokens a step");
  schema.integer("block_tokens", &o.block_tokens, 1, 255, "tokens of a KV block");
  schema.flag("prefix_cache", &o.prefix_cache, "keep the KV of prompts for later ones (prefill, both)");
  schema.integer("data_parallel_size", &o.data_parallel_size, 1, fleet::kMostEngines,
                 "engines over one copy of the weights, each with its own KV, queue and threads");
  schema.integer("threads", &o.threads, 0, 1024, "threads of an engine; 0: the cores, shared evenly by the engines");
  schema.choice("queue_policy", &o.queue_policy, queue_policies(), "whom an engine admits next");
  schema.integer("queue_age_ms", &o.queue_age_ms, 0, 3'600'000,
                 "sjf-aging: who has waited for longer comes first, oldest first");
  schema.choice("kv_admission", &o.kv_admission, {"reserve", "optimistic"},
                "reserve KV for all of max_tokens, or for the prompt only and preempt when it runs out");
  schema.integer("traces_port", &o.traces_port, -1, 65535,
                 "push the engines' traces on this port (ZeroMQ); 0 takes a free one, -1: off");
  schema.text("expert_ranks", &o.expert_ranks,
              "ranks to spread the experts over (docs/expert-ranks.md); 0: none; auto: one per NUMA node, none where "
              "there is one node");
  schema.text("expert_placement", &o.expert_placement,
              "static (experts in order), a placement file to begin with, or auto: follow the traffic");
  schema.choice("expert_solver", &o.expert_solver, {"flow", "greedy", "eplb"},
                "of expert_placement auto: by load and by where tokens come from; Gimbal's greedy for the same; or by "
                "load alone, whether it pays or not, as vLLM does");
  schema.integer("expert_moves_per_step", &o.expert_moves_per_step, 1, 1024,
                 "experts that a new placement moves in a step, at most");
  schema.integer("expert_window_ms", &o.expert_window_ms, 1, 86'400'000, "window of the expert traffic");
  schema.choice("expert_pinning", &o.expert_pinning, {"auto", "always", "never"},
                "pin ranks to processors; auto: where there is more than one NUMA node");
  schema.text("pace", &o.pace, "pad each step to this profile's time (docs/pace-profile.md); for simulated machines");
  schema.integer("lease_bytes", &o.lease_bytes, 0, INT64_MAX, "memory for KV between prefill and decode");
  schema.integer("lease_ttl_ms", &o.lease_ttl_ms, 1, 86'400'000, "how long it is kept for a decode worker");
  schema.integer("body_bytes", &o.body_bytes, 1024, INT64_MAX, "longest request body");
  schema.integer("drain_ms", &o.drain_ms, 0, 86'400'000, "time for running requests to end after SIGTERM");
  schema.accept_config_file();
  return schema;
}

Result<engine::WorkerOptions> worker_options(const WorkerArguments& o) {
  engine::WorkerOptions out;
  out.role = *parse_role(o.role);  // a choice of the schema
  out.served_model = o.served_model_name;
  out.version = KINDRED_VERSION;
  out.lease_bytes = static_cast<uint64_t>(o.lease_bytes);
  out.lease_ttl = std::chrono::milliseconds(o.lease_ttl_ms);
  out.body_bytes = static_cast<size_t>(o.body_bytes);
  if (o.traces_port >= 0) out.traces_port = static_cast<uint16_t>(o.traces_port);
  for (const std::string& peer : o.peer) {
    const auto endpoint = net::parse_endpoint(peer);
    if (!endpoint) return invalid(fmt::format("--peer: {}", endpoint.error().message), "peer");
    out.peers.push_back(*endpoint);
  }
  if (out.role == Role::kDecode && out.peers.empty())
    return invalid("--peer is needed for --role decode: the prefill workers whose KV it may pull", "peer");
  return out;
}

Result<engine::EngineOptions> engine_options(const WorkerArguments& o) {
  engine::EngineOptions out;
  if (!o.pace.empty()) {
    auto profile = engine::load_pace_profile(o.pace);
    if (!profile) return Error{profile.error().code, "--pace: " + profile.error().message, "pace"};
    out.pace = std::move(*profile);
  }
  out.context_tokens = static_cast<uint32_t>(o.context_tokens);
  out.kv_tokens = static_cast<uint32_t>(o.kv_tokens);
  out.sequences = static_cast<uint32_t>(o.sequences);
  out.token_budget = static_cast<uint32_t>(o.token_budget);
  out.block_tokens = static_cast<uint32_t>(o.block_tokens);
  // A decode worker never evaluates a prompt, and every sequence id that its cache would hold costs time in
  // each step (ARCHITECTURE.md, "256 sequence ids").
  out.prefix_cache = o.prefix_cache && o.role != "decode";
  out.threads = static_cast<uint32_t>(o.threads);
  out.queue.policy = *policy::parse_queue_policy(o.queue_policy);  // a choice of the schema
  out.queue.age_ns = o.queue_age_ms * 1'000'000;
  if (o.kv_admission == "optimistic") out.kv_admission = engine::KvAdmission::kOptimistic;
  return out;
}

Result<engine::ExpertRanksOptions> rank_options(const WorkerArguments& o) {
  engine::ExpertRanksOptions out;
  const auto ranks = engine::parse_rank_count(o.expert_ranks, engine::read_numa_nodes(engine::allowed_cpus()));
  if (!ranks) return ranks.error();
  out.ranks = *ranks;
  out.threads = static_cast<uint32_t>(o.threads);
  out.pinning = o.expert_pinning == "always"  ? engine::RankPinning::kAlways
                : o.expert_pinning == "never" ? engine::RankPinning::kNever
                                              : engine::RankPinning::kAuto;
  if (o.expert_ranks == "auto" && out.ranks == 0) return out;  // one node: no ranks, whatever is said of them
  if (o.expert_placement != "static" && out.ranks == 0) {
    return invalid("--expert-placement needs --expert-ranks", "expert_placement");
  }
  if (o.expert_placement != "static" && o.expert_placement != "auto") out.placement = o.expert_placement;
  out.moves_per_step = static_cast<uint32_t>(o.expert_moves_per_step);
  out.window = std::chrono::milliseconds(o.expert_window_ms);
  return out;
}

void show_progress(const std::string& path, float done) {
  static const bool terminal = isatty(STDERR_FILENO) == 1;
  if (terminal) fmt::print(stderr, "\rloading {}: {:3.0f} %{}", path, done * 100, done >= 1 ? "\n" : "");
}

// The io thread and the worker on it. It ends only when all coroutines have, since they refer to the
// worker and the engine.
class Service {
 public:
  Service(engine::WorkerOptions options, std::chrono::milliseconds drain, const Clock& clock, Registry& metrics)
      : drain_(drain),
        guard_(context_.get_executor()),
        signals_(context_, SIGINT, SIGTERM),
        worker_(std::make_unique<engine::Worker>(context_.get_executor(), std::move(options), clock, metrics)) {}
  ~Service() {
    if (!thread_.joinable()) return;
    asio::post(context_, [this] { begin_stop(); });
    thread_.join();
  }
  Service(const Service&) = delete;
  Service& operator=(const Service&) = delete;

  Result<uint16_t> start(const std::string& host, uint16_t port) {
    auto bound = worker_->listen(host, port);
    if (!bound) return bound;
    signals_.async_wait([this](boost::system::error_code error, int) {
      if (error) return;
      // While the model loads there is nothing to finish, and nothing else could end the loading.
      if (!serving_) std::_Exit(0);
      begin_stop();
    });
    thread_ = std::thread([this] { context_.run(); });
    return bound;
  }

  Status serve(const engine::Model& model, std::span<engine::Engine* const> engines) {
    std::promise<Status> served;
    asio::post(context_, [&] {
      serving_ = true;
      served.set_value(worker_->serve(model, engines));
    });
    return served.get_future().get();
  }

  // Until a signal has come and all requests have ended.
  void wait() { thread_.join(); }

 private:
  void begin_stop() {
    if (std::exchange(stopping_, true)) return;
    // A second signal does not wait.
    signals_.async_wait([](boost::system::error_code error, int) {
      if (!error) std::_Exit(130);
    });
    asio::co_spawn(context_, run_down(this), asio::detached);
  }
  static Task<void> run_down(Service* self) {
    co_await self->worker_->drain(self->drain_);
    self->worker_.reset();
    self->signals_.cancel();
    self->guard_.reset();
  }

  std::chrono::milliseconds drain_;
  asio::io_context context_;
  asio::executor_work_guard<asio::io_context::executor_type> guard_;
  asio::signal_set signals_;
  std::unique_ptr<engine::Worker> worker_;
  bool serving_ = false, stopping_ = false;
  std::thread thread_;
};

int run(const WorkerArguments& o, engine::WorkerOptions options, const engine::EngineOptions& of_engine,
        const engine::ExpertRanksOptions& of_ranks) {
  const SystemClock clock;
  Registry metrics;
  // Before the model: a port in use shows at once, and /health tells who asks that the model is loading.
  Service service(std::move(options), std::chrono::milliseconds(o.drain_ms), clock, metrics);
  const auto port = service.start(o.host, static_cast<uint16_t>(o.port));
  if (!port) return fail("worker " + o.name, port.error());

  auto model = engine::Model::load(o.model, [&](float done) { show_progress(o.model, done); }, of_ranks);
  if (!model) return fail("worker " + o.name, model.error());
  if (o.expert_placement == "auto" && of_ranks.ranks > 0) {
    engine::ExpertRanks& ranks = *(*model)->ranks();
    const place::Solver solver = *place::parse_solver(o.expert_solver);  // a choice of the schema
    if (Status started = ranks.start_controller(engine::cpu_controller_options(ranks, solver)); !started)
      return fail("worker " + o.name, started.error());
  }
  // Ends before the service: its thread posts to the service's io_context.
  const auto engines = engine::EngineSet::start(**model, of_engine, static_cast<uint32_t>(o.data_parallel_size), clock,
                                                metrics, engine::available_memory_bytes);
  if (!engines) return fail("worker " + o.name, engines.error());
  if (Status served = service.serve(**model, engines->engines()); !served) {
    return fail("worker " + o.name, served.error());
  }
  const std::string& name = o.served_model_name.empty() ? (*model)->info().name : o.served_model_name;
  if (of_engine.pace) {
    fmt::print("kindred worker {}: paced by '{}' ({})\n", o.name, of_engine.pace->name, of_engine.pace->source);
  }
  const std::string many = o.data_parallel_size > 1 ? fmt::format(" with {} engines", o.data_parallel_size) : "";
  fmt::print("kindred worker {}: serving {} ({}){} on {}\n", o.name, name, o.role, many,
             net::Endpoint{o.host, *port}.url());
  std::fflush(stdout);
  service.wait();
  return 0;
}

}  // namespace

int run_worker(Args args) {
  WorkerArguments o;
  ConfigSchema schema = schema_of(o);
  Status parsed = schema.parse_flags(args);
  if (schema.help_requested()) {
    fmt::print("{}", schema.help());
    return 0;
  }
  if (parsed && o.model.empty()) parsed = invalid("--model is needed: a GGUF file", "model");
  if (!parsed) {
    return fail("worker", parsed.error(), 2);
  }
  auto options = worker_options(o);
  if (!options) {
    return fail("worker", options.error(), 2);
  }
  const auto of_engine = engine_options(o);
  if (!of_engine) return fail("worker", of_engine.error(), 2);
  const auto of_ranks = rank_options(o);
  if (!of_ranks) return fail("worker", of_ranks.error(), 2);
  make_openmp_wait_passively();
  return run(o, std::move(*options), *of_engine, *of_ranks);
}

}  // namespace kindred::cli
