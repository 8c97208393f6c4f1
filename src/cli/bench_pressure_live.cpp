// The runs of `kindred bench pressure --live`.

#include "cli/bench_pressure_live.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <cmath>
#include <memory>
#include <span>
#include <thread>

#include "base/config.h"
#include "base/rng.h"
#include "cli/engine_watch.h"
#include "cli/local_cluster.h"
#include "cli/prompt_cutter.h"
#include "cli/terminal.h"
#include "sim/trace_reader.h"

namespace kindred::cli {
namespace {

constexpr auto kLiveLoads = std::to_array<double>({0.6, 0.9});
constexpr double kRangeShare = 0.99;  // of the trace's prompts: the longest that sim::reshape draws
constexpr uint32_t kMeanDraws = 10'000;
constexpr uint32_t kMostLiveRequests = 20'000;
constexpr int64_t kLiveKvTokens = 8192;
constexpr auto kSettled = std::chrono::seconds(10);
constexpr auto kSettlePoll = std::chrono::milliseconds(20);

struct LiveProfile {
  std::string name;
  double step_us = 0, prefill_us = 0, expert_us = 0, layers = 0;

  // With so many experts to touch; without what decoding sequences add.
  double full_step_s(double tokens, double experts) const {
    return (step_us + prefill_us * tokens + expert_us * layers * experts) / 1e6;
  }
};

// The worker has checked it.
Result<LiveProfile> read_live_profile(const std::string& path) {
  const Result<std::string> text = read_file(path);
  if (!text) return text.error();
  const Json json = parse_json(*text);
  if (!json.is_object()) return Error{ErrorCode::kCorrupt, fmt::format("{}: not a JSON object", path)};
  return LiveProfile{json.value("name", ""), json.value("step_us", 0.0), json.value("prefill_us_per_token", 0.0),
                     json.value("expert_us", 0.0), json.value("layers", 0.0)};
}

// Of one mix and seed; a run takes as many from the front as its rate gives.
struct LiveWorkload {
  std::vector<ChatCall> calls;
  std::vector<double> arrivals_s;  // at a rate of 1 a second
};

// Who has its queues in this order.
struct LiveWorker {
  policy::QueuePolicy queue;
  LocalCluster::Server server;
};

struct LiveJob {
  size_t mix, load, seed, arm;
};

class LiveBench {
 public:
  LiveBench(const PressureBench& bench, std::vector<PressureArm> arms, const std::string& log_dir)
      : bench_(bench), cluster_(LocalCluster::empty(log_dir)) {
    out_.grid.arms = std::move(arms);
    out_.grid.seeds = bench.quick ? 1 : bench.seeds;
    out_.grid.setups = {{"live", "paced engines of one worker", static_cast<uint32_t>(bench.engines), 1, 1}};
  }
  Status prepare();
  Result<PressureLive> run();

 private:
  Status choose();
  Status launch_workers();
  Status find_capacity(const sim::Trace& trace);
  Result<LiveWorkload> workload(const PromptCutter& cutter, const sim::Trace& trace, size_t mix, uint64_t seed) const;
  Result<LocalCluster::Server> launch_router(const LiveJob& job);
  Status wait_for_traces(LocalCluster::Server router) const;
  Result<EngineSample> wait_until_idle(const net::Endpoint& worker) const;
  Result<PressureFigures> add_answers(std::span<const ChatAnswer> answers, double took_s);
  Status run_one(const LiveJob& job);
  size_t requests_of(size_t mix, size_t load) const {
    const double count = std::round(out_.rate(mix, load) * bench_.seconds);
    return static_cast<size_t>(std::clamp(count, 2.0, static_cast<double>(kMostLiveRequests)));
  }
  const net::Endpoint& worker_of(size_t arm) const;
  size_t all_requests() const;

  const PressureBench& bench_;
  LocalCluster cluster_;
  std::vector<LiveWorker> workers_;
  std::vector<LiveWorkload> workloads_;  // [mix, seed]
  PressureLive out_;
  double prompt_tokens_ = 0;  // of all requests that ended well
  size_t ended_ = 0, progressed_ = 0;
  std::unique_ptr<Progress> progress_;
};

const net::Endpoint& LiveBench::worker_of(size_t arm) const {
  const auto found = std::ranges::find(workers_, out_.grid.arms[arm].queue, &LiveWorker::queue);
  KINDRED_CHECK(found != workers_.end());
  return cluster_.endpoint(found->server);
}

Status LiveBench::choose() {
  for (const std::string& name : bench_.mixes) {
    const Result<sim::LengthMix> mix = sim::parse_length_mix(name);
    if (!mix) return mix.error();
    out_.grid.mixes.push_back(*mix);
  }
  out_.first_seed = bench_.first_seed;
  out_.token_budget = bench_.token_budget;
  out_.rates_given = !bench_.live_rates.empty();
  for (const std::string& text : bench_.live_rates) {
    double rate = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), rate);
    if (error != std::errc() || end != text.data() + text.size() || !(rate > 0) || rate > 1000) {
      return invalid(fmt::format("--live-rate: got '{}'; accepted: requests a second, above 0 and up to 1000", text),
                     "live_rate");
    }
    out_.grid.loads.push_back(rate);
  }
  if (!out_.rates_given) out_.grid.loads.assign(kLiveLoads.begin(), kLiveLoads.end());
  for (double& load : out_.grid.loads) load *= bench_.scale;
  return {};
}

Status LiveBench::launch_workers() {
  for (const PressureArm& arm : out_.grid.arms) {
    if (std::ranges::find(workers_, arm.queue, &LiveWorker::queue) != workers_.end()) continue;
    const std::string queue(policy::to_string(arm.queue));
    const Result<LocalCluster::Server> worker = cluster_.launch("worker " + queue, 0,
                                                                {"worker",
                                                                 "--model",
                                                                 bench_.model,
                                                                 "--pace",
                                                                 bench_.pace,
                                                                 "--threads",
                                                                 "1",
                                                                 "--data-parallel-size",
                                                                 std::to_string(bench_.engines),
                                                                 "--traces-port",
                                                                 "0",
                                                                 "--queue-policy",
                                                                 queue,
                                                                 "--prefix-cache=false",
                                                                 "--token-budget",
                                                                 std::to_string(bench_.token_budget),
                                                                 "--sequences",
                                                                 std::to_string(kLiveSequences),
                                                                 "--kv-tokens",
                                                                 std::to_string(kLiveKvTokens)},
                                                                "/health");
    if (!worker) return worker.error();
    workers_.push_back({arm.queue, *worker});
  }
  return cluster_.wait_ready();
}

// What the engines can do by the profile, if all steps are full and touch all experts.
Status LiveBench::find_capacity(const sim::Trace& trace) {
  const Result<LiveProfile> profile = read_live_profile(bench_.pace);
  if (!profile) return profile.error();
  const Result<std::string> models = fetch(worker_of(0), "/v1/models");
  if (!models) return models.error();
  const Json about = parse_json(*models);
  if (!about.is_object()) return Error{ErrorCode::kCorrupt, "/v1/models: not a JSON object"};
  out_.pace = profile->name;
  out_.step_s = profile->full_step_s(static_cast<double>(bench_.token_budget),
                                     about.value(Json::json_pointer("/data/0/kindred/experts"), 0.0));
  if (!(out_.step_s > 0)) return invalid("--pace: accepted: a profile whose steps take time", "pace");
  const double tokens_per_s = static_cast<double>(bench_.engines * bench_.token_budget) / out_.step_s;
  std::vector<double> lengths;
  for (const sim::TraceRequest& request : trace.requests) lengths.push_back(request.prompt_tokens);
  out_.token_scale = static_cast<double>(bench_.longest_prompt) / quantile(std::move(lengths), kRangeShare);
  out_.pressure = bench_.pressure;
  out_.pressure.kv_weight *= out_.token_scale;
  out_.pressure.expert_weight *= out_.token_scale;
  out_.pressure.epsilon_tokens *= out_.token_scale;
  for (const sim::LengthMix mix : out_.grid.mixes) {
    const auto drawn =
        sim::reshape(trace.requests, {.mix = mix,
                                      .requests = kMeanDraws,
                                      .longest_prompt_tokens = static_cast<uint32_t>(bench_.longest_prompt),
                                      .seed = static_cast<uint64_t>(bench_.first_seed)});
    if (!drawn) return drawn.error();
    double sum = 0;
    for (const sim::TraceRequest& request : *drawn) sum += request.prompt_tokens;
    out_.mean_prompt_tokens.push_back(sum / kMeanDraws);
    out_.capacity_per_s.push_back(tokens_per_s / (out_.mean_prompt_tokens.back() + kLiveOutputTokens));
  }
  return {};
}

Result<LiveWorkload> LiveBench::workload(const PromptCutter& cutter, const sim::Trace& trace, size_t mix,
                                         uint64_t seed) const {
  size_t count = 0;
  for (size_t load = 0; load < out_.grid.loads.size(); ++load) count = std::max(count, requests_of(mix, load));
  const auto lengths =
      sim::reshape(trace.requests, {.mix = out_.grid.mixes[mix],
                                    .requests = static_cast<uint32_t>(count),
                                    .longest_prompt_tokens = static_cast<uint32_t>(bench_.longest_prompt),
                                    .seed = seed});
  if (!lengths) return lengths.error();
  const Result<sim::Trace> arrivals = sim::draw_arrivals({.requests = count, .rate_per_s = 1, .seed = seed});
  if (!arrivals) return arrivals.error();
  Rng rng(mix64(seed) ^ mix);
  LiveWorkload out;
  for (size_t i = 0; i < count; ++i) {
    Result<std::string> text = cutter.cut((*lengths)[i].prompt_tokens, rng);
    if (!text) return std::move(text).error();
    ChatCall call;
    call.prompt = *std::move(text);
    call.max_tokens = kLiveOutputTokens;
    call.temperature = 0.8;
    call.seed = static_cast<int64_t>(i);
    call.ignore_eos = true;  // equal lengths: the policies differ in nothing else
    call.prefix_cache = false;
    out.calls.push_back(std::move(call));
    out.arrivals_s.push_back(arrivals->requests[i].arrival_s);
  }
  return out;
}

Status LiveBench::prepare() {
  if (Status ok = choose(); !ok) return ok;
  const Result<sim::Trace> trace = pressure_lengths(bench_);
  if (!trace) return trace.error();
  if (Status up = launch_workers(); !up) return up;
  if (Status found = find_capacity(*trace); !found) return found;
  const Result<PromptCutter> cutter = PromptCutter::make(worker_of(0), find_root() + "/data/prompts/bench_task.jsonl");
  if (!cutter) return cutter.error();
  const PressureGrid& grid = out_.grid;
  for (size_t mix = 0; mix < grid.mixes.size(); ++mix) {
    for (int64_t seed = 0; seed < grid.seeds; ++seed) {
      Result<LiveWorkload> made = workload(*cutter, *trace, mix, static_cast<uint64_t>(bench_.first_seed + seed));
      if (!made) return std::move(made).error();
      workloads_.push_back(*std::move(made));
    }
  }
  return {};
}

Result<LocalCluster::Server> LiveBench::launch_router(const LiveJob& job) {
  const policy::PressureOptions& pressure = out_.pressure;
  const PressureArm& arm = out_.grid.arms[job.arm];
  return cluster_.launch(
      fmt::format("router {}-{}-{}-{}", job.mix, job.load, job.seed, job.arm), 0,
      {"router", "--worker", worker_of(job.arm).url(), "--engine-policy", arm.engine.name, "--seed",
       std::to_string(bench_.first_seed + static_cast<int64_t>(job.seed)), "--pressure-kv-weight",
       fmt::to_string(pressure.kv_weight), "--pressure-expert-weight", fmt::to_string(pressure.expert_weight),
       "--pressure-epsilon-tokens", fmt::to_string(pressure.epsilon_tokens), "--pressure-epsilon-share",
       fmt::to_string(pressure.epsilon_share)},
      "/ready");
}

// A router that has just started would choose blindly.
Status LiveBench::wait_for_traces(LocalCluster::Server router) const {
  const auto give_up = std::chrono::steady_clock::now() + kSettled;
  while (std::chrono::steady_clock::now() < give_up) {
    const Result<std::string> page = fetch(cluster_.endpoint(router), "/status");
    const Json status = page ? parse_json(*page) : Json();
    const Json engines = status.is_object() ? status.value(Json::json_pointer("/workers/0/engines"), Json()) : Json();
    const bool known = engines.is_array() && engines.size() == static_cast<size_t>(bench_.engines);
    if (known && std::ranges::all_of(engines, [](const Json& e) { return e.value("trace", "") == "fresh"; })) return {};
    std::this_thread::sleep_for(kSettlePoll);
  }
  return Error{ErrorCode::kTimeout, "the router got no traces of the worker's engines"};
}

Result<EngineSample> LiveBench::wait_until_idle(const net::Endpoint& worker) const {
  const auto give_up = std::chrono::steady_clock::now() + kSettled;
  for (;;) {
    Result<EngineSample> sample = sample_engines(worker);
    if (!sample || sample->in_engines() == 0) return sample;
    if (std::chrono::steady_clock::now() > give_up) {
      return Error{ErrorCode::kTimeout, "the worker still has requests after all were answered"};
    }
    std::this_thread::sleep_for(kSettlePoll);
  }
}

// Counts a run's answers, and what they say.
Result<PressureFigures> LiveBench::add_answers(std::span<const ChatAnswer> answers, double took_s) {
  PressureFigures figures;
  std::vector<double> ttft_s;
  double tpots = 0, output_tokens = 0;
  for (const ChatAnswer& answer : answers) {
    ++out_.requests;
    if (!answer.status.ok()) {
      if (out_.grid.failed++ == 0) out_.first_error = answer.status.error().message;
      continue;
    }
    ++ended_;
    prompt_tokens_ += answer.prompt_tokens;
    ttft_s.push_back(answer.ttft_s);
    figures.ttft_s += answer.ttft_s;
    figures.total_s += answer.total_s;
    output_tokens += answer.completion_tokens;
    if (const std::optional<double> tpot = answer.tpot_s()) {
      figures.tpot_s += *tpot;
      ++tpots;
    }
  }
  if (ttft_s.empty()) return Error{ErrorCode::kUnavailable, "no request was answered: " + out_.first_error};
  const auto ended = static_cast<double>(ttft_s.size());
  figures.ttft_s /= ended;
  figures.total_s /= ended;
  figures.tpot_s = tpots > 0 ? figures.tpot_s / tpots : 0;
  figures.ttft_p99_s = quantile(std::move(ttft_s), 0.99);
  figures.requests_per_s = ended / took_s;
  figures.tokens_per_s = output_tokens / took_s;
  return figures;
}

Status LiveBench::run_one(const LiveJob& job) {
  const Result<LocalCluster::Server> router = launch_router(job);
  if (!router) return router.error();
  if (Status up = cluster_.wait_ready(); !up) return up;
  if (Status known = wait_for_traces(*router); !known) return known;
  const net::Endpoint& worker = worker_of(job.arm);
  const Result<EngineSample> before = wait_until_idle(worker);
  if (!before) return before.error();

  const LiveWorkload& work = workloads_[job.mix * static_cast<size_t>(out_.grid.seeds) + job.seed];
  const std::span calls(work.calls.data(), requests_of(job.mix, job.load));
  LoadOptions load;
  for (size_t i = 0; i < calls.size(); ++i) {
    load.arrivals_s.push_back(work.arrivals_s[i] / out_.rate(job.mix, job.load));
  }
  load.on_answer = [this](size_t, const ChatAnswer&) { progress_->set(++progressed_); };
  EngineWatch watch(worker);
  const auto began = std::chrono::steady_clock::now();
  const std::vector<ChatAnswer> answers = run_chats(cluster_.endpoint(*router), calls, load);
  const double took_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  const std::vector<EngineSample> samples = watch.finish();
  cluster_.stop(*router);
  const Result<EngineSample> after = wait_until_idle(worker);
  if (!after) return after.error();

  Result<PressureFigures> figures = add_answers(answers, took_s);
  if (!figures) return std::move(figures).error();
  figures->preemptions = after->preemptions - before->preemptions;
  const auto arrived = std::chrono::duration<double>(load.arrivals_s.back());
  const EngineUse use =
      engine_use(samples, began + std::chrono::duration_cast<std::chrono::steady_clock::duration>(arrived));
  figures->gap_tokens_per_s = use.gap_tokens_per_s;
  figures->running = use.running;
  figures->kv = use.kv;
  const double steps = after->paced_steps - before->paced_steps;
  const double overruns = after->pace_overruns - before->pace_overruns;
  out_.paced_steps += steps;
  out_.pace_overruns += overruns;
  const size_t cell = out_.grid.at(0, job.mix, job.load, job.seed, job.arm);
  out_.overrun_shares[cell] = steps > 0 ? overruns / steps : 0;
  out_.grid.cells[cell] = *figures;
  return {};
}

size_t LiveBench::all_requests() const {
  size_t sum = 0;
  for (size_t mix = 0; mix < out_.grid.mixes.size(); ++mix) {
    for (size_t load = 0; load < out_.grid.loads.size(); ++load) sum += requests_of(mix, load);
  }
  return sum * static_cast<size_t>(out_.grid.seeds) * out_.grid.arms.size();
}

Result<PressureLive> LiveBench::run() {
  PressureGrid& grid = out_.grid;
  const auto seeds = static_cast<size_t>(grid.seeds);
  grid.cells.resize(grid.mixes.size() * grid.loads.size() * seeds * grid.arms.size());
  out_.overrun_shares.resize(grid.cells.size());
  progress_ = std::make_unique<Progress>("sending requests, all policies", all_requests());
  const auto began = std::chrono::steady_clock::now();
  size_t turn = 0;
  for (size_t seed = 0; seed < seeds; ++seed) {
    for (size_t mix = 0; mix < grid.mixes.size(); ++mix) {
      for (size_t load = 0; load < grid.loads.size(); ++load) {
        // The order turns, so that a drift of the machine hits all alike.
        const size_t first = turn++;
        for (size_t i = 0; i < grid.arms.size(); ++i) {
          const LiveJob job{mix, load, seed, (first + i) % grid.arms.size()};
          if (Status done = run_one(job); !done) return std::move(done).error();
        }
      }
    }
  }
  progress_.reset();
  grid.took_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  out_.measured_prompt_tokens = prompt_tokens_ / static_cast<double>(ended_);
  return std::move(out_);
}

}  // namespace

double PressureLive::overrun_share(size_t mix, size_t load, size_t arm) const {
  double sum = 0;
  for (size_t seed = 0; seed < static_cast<size_t>(grid.seeds); ++seed) {
    sum += overrun_shares[grid.at(0, mix, load, seed, arm)];
  }
  return sum / static_cast<double>(grid.seeds);
}

Result<PressureBench> live_pressure_bench(PressureBench bench) {
  const auto refuse = [](std::string_view flag) {
    return invalid(fmt::format("--{}: not with --live, which runs processes", flag), std::string(flag));
  };
  if (bench.ablation) return refuse("ablation");
  if (!bench.setups.empty()) return refuse("setup");
  if (!bench.output.plots.empty()) return refuse("plots");
  if (bench.mixes.empty()) bench.mixes = {"two-end", "random"};
  if (bench.policies.empty()) bench.policies = {"request-count", "pressure", "pressure+sjf-aging"};
  if (bench.model.empty()) bench.model = find_root() + "/models/kindred-tiny-moe-q8_0.gguf";
  if (bench.pace.empty()) bench.pace = find_root() + "/models/pace-demo.json";
  std::vector<std::string_view> known;
  for (const std::string_view name : policy::engine_policy_names()) {
    if (name != "replay") known.push_back(name);  // nobody has assigned live requests beforehand
  }
  for (const PressureArm& arm : pressure_arms(bench)) {
    if (std::ranges::find(known, arm.engine.name) != known.end()) continue;
    return invalid(fmt::format("--policy: got '{}'; accepted with --live: {}", arm.name, fmt::join(known, ", ")),
                   "policy");
  }
  return bench;
}

Result<PressureLive> run_pressure_live(const PressureBench& bench, std::vector<PressureArm> arms) {
  const Result<ScratchDir> scratch = ScratchDir::make();
  if (!scratch) return scratch.error();
  LiveBench live(bench, std::move(arms), scratch->path());
  if (Status ready = live.prepare(); !ready) return std::move(ready).error();
  return live.run();
}

}  // namespace kindred::cli
