// The runs of `kindred bench coordinate`.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "base/clock.h"
#include "base/rng.h"
#include "cli/bench_coordinate.h"
#include "cli/process.h"
#include "cli/prompts.h"
#include "cli/terminal.h"
#include "engine/engine_set.h"
#include "engine/expert_controller.h"
#include "engine/expert_ranks.h"
#include "engine/memory.h"
#include "engine/widen.h"
#include "policy/engine_policy.h"

namespace kindred::cli {
namespace {

constexpr auto kCoordinateArms = std::to_array<CoordinateArm>({
    {"baseline", false, ExpertPlacing::kEplb, false},
    {"DP only", true, ExpertPlacing::kStatic, false},
    {"EP only", false, ExpertPlacing::kFlow, false},
    {"both, no feedback", true, ExpertPlacing::kFlow, false},
    {"both", true, ExpertPlacing::kFlow, true},
});

constexpr uint32_t kCoordinateShortest = 16;
constexpr uint32_t kCoordinateWaiting =
    2;  // requests of an engine beyond those it can run: what a queue policy and W see
// Pressure's constants are meant for prompts of up to about so many tokens; shorter ones scale them.
constexpr double kUsualLongestPrompt = 4096;
constexpr size_t kLinkBytes = size_t{256} << 20;

struct CoordinateRequest {
  std::vector<engine::Token> prompt;
  std::optional<size_t> bound;  // to this engine
};

// Request i is the same in all runs, whenever it is sent.
class CoordinateTraffic {
 public:
  static Result<CoordinateTraffic> make(const CoordinateBench& bench, const engine::Model& model);
  CoordinateRequest request(uint64_t i) const;
  std::vector<std::string> homes() const;

 private:
  struct Domain {
    std::string name;
    std::vector<engine::Token> tokens;  // of its prompts, one after another
  };
  size_t home(size_t domain) const { return domain * engines_ / domains_.size(); }

  std::vector<Domain> domains_;
  size_t engines_ = 1;
  double bound_share_ = 0, longest_prompt_ = 0;
  uint64_t seed_ = 0;
};

Result<CoordinateTraffic> CoordinateTraffic::make(const CoordinateBench& bench, const engine::Model& model) {
  auto prompts = load_prompts(bench.prompts);
  if (!prompts) return std::move(prompts).error();
  std::map<std::string, std::vector<engine::Token>> by_domain;
  for (const Prompt& prompt : *prompts) {
    std::vector<engine::Token>& of = by_domain[prompt.domain];
    const std::vector<engine::Token> tokens = model.tokenize(prompt.text + "\n", false);
    of.insert(of.end(), tokens.begin(), tokens.end());
  }
  CoordinateTraffic out;
  for (auto& [name, tokens] : by_domain) {
    if (!tokens.empty()) out.domains_.push_back({name, std::move(tokens)});
  }
  if (out.domains_.size() < static_cast<size_t>(bench.engines)) {
    return invalid(fmt::format("{}: {} domains; accepted: at least one for each of the {} engines", bench.prompts,
                               out.domains_.size(), bench.engines),
                   "prompts");
  }
  out.engines_ = static_cast<size_t>(bench.engines);
  out.bound_share_ = bench.bound_share;
  out.longest_prompt_ = static_cast<double>(bench.longest_prompt);
  out.seed_ = static_cast<uint64_t>(bench.seed);
  return out;
}

// Lengths are even on a logarithmic scale, so that a few prompts are much longer than the others.
CoordinateRequest CoordinateTraffic::request(uint64_t i) const {
  Rng rng(mix64(seed_) ^ mix64(i + 1));
  const size_t domain = rng.below(domains_.size());
  const std::vector<engine::Token>& tokens = domains_[domain].tokens;
  const auto length =
      static_cast<size_t>(kCoordinateShortest * std::pow(longest_prompt_ / kCoordinateShortest, rng.uniform()));
  CoordinateRequest out;
  size_t at = rng.below(tokens.size());
  for (size_t t = 0; t < length; ++t) {
    out.prompt.push_back(tokens[at]);
    at = at + 1 == tokens.size() ? 0 : at + 1;
  }
  if (rng.uniform() < bound_share_) out.bound = home(domain);
  return out;
}

std::vector<std::string> CoordinateTraffic::homes() const {
  std::vector<std::string> out(engines_);
  for (size_t d = 0; d < domains_.size(); ++d) {
    std::string& of = out[home(d)];
    of += (of.empty() ? "" : ", ") + domains_[d].name;
  }
  return out;
}

// One arm, from loading the model to its figures.
class CoordinateRun {
 public:
  CoordinateRun(const CoordinateBench& bench, const CoordinateArm& arm) : bench_(bench), arm_(arm) {}
  Status open(const std::string& model_path, uint32_t ranks);
  Result<CoordinateFigures> run(const CoordinateTraffic& traffic, const std::function<void()>& on_tick);
  const engine::Model& model() const { return *model_; }

 private:
  // Of everything so far.
  struct Totals {
    engine::RankTraffic traffic;
    uint64_t steps = 0;
    double step_s = 0, cpu_s = 0;
  };
  Totals totals() const;
  size_t choose(const CoordinateRequest& request);
  Status submit(const CoordinateRequest& request);
  Status serve_for(const CoordinateTraffic& traffic, double least_s, const std::function<void()>& on_tick);
  CoordinateFigures figures(const Totals& from, const Totals& to) const;

  const CoordinateBench& bench_;
  const CoordinateArm& arm_;
  const SystemClock clock_;
  Registry metrics_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<uint32_t> in_flight_;  // by engine
  uint64_t sent_ = 0, ended_ = 0;
  double ttft_s_ = 0, first_tokens_ = 0;
  Status failed_;

  std::unique_ptr<engine::Model> model_;  // the rest works on it, and ends before it
  std::unique_ptr<policy::EnginePolicy> policy_;
  std::optional<engine::EngineSet> engines_;
  std::optional<engine::ExpertController> controller_;
};

Status CoordinateRun::open(const std::string& model_path, uint32_t ranks) {
  auto model = engine::Model::load(
      model_path, {}, {.ranks = ranks, .threads = ranks, .window = std::chrono::milliseconds(bench_.window_ms)});
  if (!model) return std::move(model).error();
  model_ = std::move(*model);
  policy::EnginePolicyOptions policy;
  policy.name = arm_.pressure ? "pressure" : "request-count";
  const double scale = static_cast<double>(bench_.longest_prompt) / kUsualLongestPrompt;
  policy.pressure.kv_weight *= scale;
  policy.pressure.expert_weight *= scale;
  policy.pressure.epsilon_tokens *= scale;
  policy.pressure.experts = arm_.feedback;
  auto made = policy::make_engine_policy(policy);
  if (!made) return std::move(made).error();
  policy_ = std::move(*made);

  engine::EngineOptions options;
  options.kv_tokens =
      static_cast<uint32_t>((bench_.sequences + 1) * (bench_.longest_prompt + bench_.output_tokens + 2 * 16));
  options.sequences = static_cast<uint32_t>(bench_.sequences);
  options.token_budget = static_cast<uint32_t>(bench_.token_budget);
  options.prefix_cache = false;
  options.capture_experts = false;  // the ranks count
  options.threads = 1;
  auto engines = engine::EngineSet::start(*model_, options, static_cast<uint32_t>(bench_.engines), clock_, metrics_,
                                          engine::available_memory_bytes);
  if (!engines) return std::move(engines).error();
  engines_.emplace(std::move(*engines));
  in_flight_.assign(engines_->engines().size(), 0);
  if (arm_.placing == ExpertPlacing::kStatic) return {};
  engine::ExpertRanks& r = *model_->ranks();
  if (r.shape().experts % ranks != 0) {
    return invalid(
        fmt::format("--ranks: {} experts on {}; accepted: ranks that hold as many each", r.shape().experts, ranks),
        "ranks");
  }
  const bool eplb = arm_.placing == ExpertPlacing::kEplb;
  engine::ExpertControllerOptions control =
      engine::cpu_controller_options(r, eplb ? place::Solver::kEplb : place::Solver::kFlow);
  if (bench_.way_us > 0) {
    place::MigrationOptions& costs = control.rebalance.migration;
    costs.token_bytes = bench_.way_us * 1e-6 * costs.link_bytes_per_s * ranks;
    control.weights = place::weights_of(costs, ranks);
  }
  controller_.emplace(r, control);
  return {};
}

CoordinateRun::Totals CoordinateRun::totals() const {
  const engine::ExpertRanks& ranks = *model_->ranks();
  Totals out{.traffic = ranks.traffic(), .cpu_s = time_now_s(TimeBy::kProcessor)};
  for (const bool migrating : {false, true}) {
    const engine::StepLatency latency = ranks.step_latency(migrating);
    out.steps += latency.steps;
    out.step_s += latency.total_s;
  }
  return out;
}

// A router's view of the engines, without its delays: what they say now.
size_t CoordinateRun::choose(const CoordinateRequest& request) {
  if (request.bound) return *request.bound;
  const std::vector<double> pressure = model_->ranks()->expert_pressure();
  std::vector<policy::EngineView> views(in_flight_.size());
  for (size_t i = 0; i < views.size(); ++i) {
    const fleet::EngineTrace trace = engines_->engines()[i]->trace();
    views[i].trace = policy::TraceState::kFresh;
    views[i].remaining_prefill_tokens = static_cast<double>(trace.remaining_prefill_tokens);
    views[i].waiting_prefill_tokens = static_cast<double>(trace.waiting_prefill_tokens);
    views[i].running = trace.running;
    views[i].waiting = trace.waiting;
    views[i].kv_usage = trace.kv_usage;
    views[i].expert_pressure = i < pressure.size() ? pressure[i] : 0;
    const std::lock_guard lock(mutex_);
    views[i].in_flight = in_flight_[i];
  }
  const auto decision = policy_->choose(views, {.prompt_tokens = static_cast<double>(request.prompt.size())});
  KINDRED_CHECK(decision.has_value());  // all engines are available
  return decision->worker;
}

Status CoordinateRun::submit(const CoordinateRequest& request) {
  const size_t at = choose(request);
  engine::Job job;
  job.prompt = request.prompt;
  job.sampling.temperature = 0.8;
  job.sampling.ignore_eos = true;
  job.max_tokens = static_cast<uint32_t>(bench_.output_tokens);
  engine::ChoiceState choice;
  choice.seed = sent_ + 1;
  job.choices.push_back(std::move(choice));
  job.prefix_cache = false;
  {
    const std::lock_guard lock(mutex_);
    ++in_flight_[at];
    ++sent_;
  }
  job.on_event = [this, at, began = clock_.now(), first = true](const engine::Event& event) mutable {
    const std::lock_guard lock(mutex_);
    if (std::holds_alternative<engine::Output>(event) && std::exchange(first, false)) {
      ttft_s_ += seconds_between(began, clock_.now());
      ++first_tokens_;
    }
    const auto* error = std::get_if<Error>(&event);
    if (error == nullptr && !std::holds_alternative<engine::Finished>(event)) return;
    if (error != nullptr && error->code != ErrorCode::kCancelled) failed_ = *error;
    --in_flight_[at];
    ++ended_;
    changed_.notify_one();
  };
  const auto id = engines_->engines()[at]->submit(std::move(job));
  return id ? Status{} : Status{id.error()};
}

// Closed loop: when one ends, the next one is sent. On a slow machine it goes on until as many have ended as are served
// at once.
Status CoordinateRun::serve_for(const CoordinateTraffic& traffic, double least_s,
                                const std::function<void()>& on_tick) {
  const auto most =
      static_cast<uint64_t>(bench_.engines) * (static_cast<uint64_t>(bench_.sequences) + kCoordinateWaiting);
  constexpr auto kTick = std::chrono::milliseconds(200);
  const MonotonicTime began = clock_.now();
  std::optional<uint64_t> ended_before;
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      if (!ended_before) ended_before = ended_;
      if (seconds_between(began, clock_.now()) >= least_s && ended_ - *ended_before >= most) return {};
      changed_.wait_for(lock, kTick, [&] { return sent_ - ended_ < most || !failed_.ok(); });
      if (!failed_.ok()) return failed_;
      if (sent_ - ended_ >= most) {
        lock.unlock();
        on_tick();
        continue;
      }
    }
    if (Status sent = submit(traffic.request(sent_)); !sent) return sent;
    on_tick();
  }
}

CoordinateFigures CoordinateRun::figures(const Totals& from, const Totals& to) const {
  const engine::ExpertRanks& ranks = *model_->ranks();
  engine::RankTraffic traffic = to.traffic;
  subtract_traffic(traffic, from.traffic, ranks.shape());
  CoordinateFigures out;
  out.imbalance = rank_imbalance(traffic, ranks.shape());
  out.dispatch_imbalance = dispatch_imbalance(traffic, ranks.shape());
  out.remote_share = remote_share(traffic, ranks.shape());
  const std::vector<double> active = rank_active_experts(traffic);
  for (const double experts : active) out.rank_active += experts / static_cast<double>(active.size());
  const std::vector<double> pressure = source_pressure(traffic, ranks.shape(), ranks.top_k());
  double sum = 0;
  for (const double of_engine : pressure) sum += of_engine;
  if (sum > 0) out.pressure_gap = std::ranges::max(pressure) * static_cast<double>(pressure.size()) / sum;
  const engine::MigrationProgress progress = ranks.progress();
  out.moves = static_cast<double>(progress.total_moves);
  out.moved_mb = static_cast<double>(progress.total_bytes) / 1e6;
  if (controller_) out.placements = static_cast<double>(controller_->report().applied);
  const auto steps = static_cast<double>(std::max<uint64_t>(1, to.steps - from.steps));
  out.step_ms = 1e3 * (to.step_s - from.step_s) / steps;
  out.step_cpu_ms = 1e3 * (to.cpu_s - from.cpu_s) / steps;
  return out;
}

Result<CoordinateFigures> CoordinateRun::run(const CoordinateTraffic& traffic, const std::function<void()>& on_tick) {
  if (Status done = serve_for(traffic, bench_.settle_s, on_tick); !done) return std::move(done).error();
  const Totals before = totals();
  uint64_t ended = 0;
  {
    const std::lock_guard lock(mutex_);
    ended = ended_;
    ttft_s_ = first_tokens_ = 0;
  }
  if (Status done = serve_for(traffic, bench_.seconds, on_tick); !done) return std::move(done).error();
  CoordinateFigures out = figures(before, totals());
  const std::lock_guard lock(mutex_);
  out.requests = static_cast<double>(ended_ - ended);
  out.ttft_ms = first_tokens_ > 0 ? 1e3 * ttft_s_ / first_tokens_ : 0;
  return out;
}

Result<std::vector<uint32_t>> coordinate_ranks(const CoordinateBench& bench) {
  std::vector<std::string> texts = bench.ranks;
  if (texts.empty()) texts = bench.quick ? std::vector<std::string>{"2"} : std::vector<std::string>{"2", "4"};
  std::vector<uint32_t> out;
  for (const std::string& text : texts) {
    uint32_t ranks = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), ranks);
    if (error != std::errc() || end != text.data() + text.size() || ranks < 2 || ranks > 1024) {
      return invalid(fmt::format("--ranks: got '{}'; accepted: 2 to 1024", text), "ranks");
    }
    out.push_back(ranks);
  }
  return out;
}

}  // namespace

std::span<const CoordinateArm> coordinate_arms() { return kCoordinateArms; }

Result<CoordinateResult> run_coordinate(const CoordinateBench& bench) {
  const auto ranks = coordinate_ranks(bench);
  if (!ranks) return ranks.error();
  const auto scratch = ScratchDir::make();
  if (!scratch) return scratch.error();
  const std::string path = scratch->path() + "/widened.gguf";
  const auto widened =
      engine::widen_gguf(bench.model, path, {.factor = static_cast<uint32_t>(bench.factor), .type = bench.type});
  if (!widened) return widened.error();

  CoordinateResult out;
  out.expert_mb = static_cast<double>(widened->expert_bytes) / 1e6;
  const double run_s = bench.settle_s + bench.seconds;
  const size_t arms = kCoordinateArms.size();
  Progress progress("measuring (s)", static_cast<size_t>(run_s * static_cast<double>(arms * ranks->size())));
  std::optional<CoordinateTraffic> traffic;
  double done_s = 0;
  for (const uint32_t r : *ranks) {
    CoordinateRank table{.ranks = r, .arms = {}};
    for (const CoordinateArm& arm : kCoordinateArms) {
      CoordinateRun run(bench, arm);
      if (Status opened = run.open(path, r); !opened) return std::move(opened).error();
      if (!traffic) {
        auto made = CoordinateTraffic::make(bench, run.model());
        if (!made) return std::move(made).error();
        traffic.emplace(std::move(*made));
      }
      const engine::RankShape& shape = run.model().ranks()->shape();
      out.experts = shape.experts;
      out.layers = shape.layers;
      out.top_k = run.model().ranks()->top_k();
      const auto began = std::chrono::steady_clock::now();
      auto figures = run.run(*traffic, [&] {
        const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - began;
        progress.set(static_cast<size_t>(done_s + std::min(spent.count(), run_s)));
      });
      if (!figures) return std::move(figures).error();
      table.arms.push_back(*figures);
      done_s += run_s;
    }
    out.tables.push_back(std::move(table));
  }
  out.homes = traffic->homes();
  out.links = measure_numa_links(engine::read_numa_nodes(engine::allowed_cpus()), kLinkBytes);
  return out;
}

}  // namespace kindred::cli
