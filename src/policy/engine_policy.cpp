#include "policy/engine_policy.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "policy/chooser.h"
#include "policy/pressure.h"

namespace kindred::policy {
namespace {

constexpr std::string_view kPressureName = "pressure";
constexpr std::string_view kRoundRobinName = "round-robin";
constexpr std::string_view kRequestCountName = "request-count";
constexpr std::string_view kVllm21Name = "vllm-0.21";
constexpr std::string_view kVllm27Name = "vllm-0.27";
constexpr std::string_view kTotalTokensName = "total-tokens";
constexpr std::string_view kLeastLoadName = "least-load";
constexpr std::string_view kReplayName = "replay";
constexpr auto kNames = std::to_array<std::string_view>({kPressureName, kRoundRobinName, kRequestCountName, kVllm21Name,
                                                         kVllm27Name, kTotalTokensName, kLeastLoadName, kReplayName});
// A full cache would be infinitely far away, and so would all be that are full.
constexpr double kFullest = 0.999;

std::vector<uint32_t> available_engines(std::span<const EngineView> engines) {
  std::vector<uint32_t> out;
  for (uint32_t e = 0; e < engines.size(); ++e) {
    if (engines[e].available) out.push_back(e);
  }
  return out;
}

// As others count: requests there, by the trace and what was sent since, or by the ledger alone.
double running(const EngineView& engine) {
  return engine.trace == TraceState::kFresh ? engine.running : engine.in_flight;
}
double waiting(const EngineView& engine) { return engine.trace == TraceState::kFresh ? engine.waiting : 0; }
double unseen(const EngineView& engine) { return engine.trace == TraceState::kFresh ? engine.unseen : 0; }

double request_count(const EngineView& engine, const EnginePolicyOptions&) { return engine.in_flight; }

double vllm_21(const EngineView& engine, const EnginePolicyOptions& options) {
  return 4 * (waiting(engine) + options.clients * unseen(engine)) + running(engine);
}

double vllm_27(const EngineView& engine, const EnginePolicyOptions& options) {
  const double kv = engine.trace == TraceState::kFresh ? engine.kv_usage : 0;
  return std::max(options.clients * engine.in_flight, waiting(engine) + running(engine)) +
         6 * waiting(engine) * std::max(0.0, kv - 0.5);
}

double total_tokens(const EngineView& engine, const EnginePolicyOptions&) {
  if (engine.trace != TraceState::kFresh) return engine.compensation_tokens;
  return engine.kv_used_tokens + engine.waiting_prefill_tokens + engine.compensation_tokens;
}

double least_load(const EngineView& engine, const EnginePolicyOptions& options) {
  const double requests = waiting(engine) + running(engine) + unseen(engine);
  const double k = engine.trace == TraceState::kFresh ? std::min(engine.kv_usage, kFullest) : 0;
  return requests / (engine.throughput > 0 ? engine.throughput : 1) + options.kv_lambda * k / (1 - k);
}

// The least of a score wins, ties by the chooser's rule.
class LeastScore final : public EnginePolicy {
 public:
  using Score = double (*)(const EngineView&, const EnginePolicyOptions&);

  LeastScore(std::string_view name, Score score, const EnginePolicyOptions& options, Chooser chooser)
      : name_(name), score_(score), options_(options), chooser_(chooser) {}

  std::optional<Decision> choose(std::span<const EngineView> engines, const EngineRequest&) override {
    Decision decision;
    decision.policy = name_;
    decision.reason = Reason::kLeastLoaded;
    decision.candidates = available_engines(engines);
    if (decision.candidates.empty()) return std::nullopt;
    views_.assign(engines.size(), {});
    decision.scores.assign(engines.size(), std::numeric_limits<float>::quiet_NaN());
    for (const uint32_t e : decision.candidates) {
      // A slow start is a part of what the others get, for whatever the score counts.
      const double score = score_(engines[e], options_);
      views_[e].load = engines[e].share < 1 ? (score + 1) / engines[e].share - 1 : score;
      decision.scores[e] = static_cast<float>(views_[e].load);
    }
    if (name_ == kTotalTokensName) keep_fewest_requests(engines, decision.candidates);
    decision.worker = chooser_.least_loaded(views_, decision.candidates);
    return decision;
  }
  std::string_view name() const override { return name_; }

 private:
  // SGLang's rule among equals: fewer requests.
  void keep_fewest_requests(std::span<const EngineView> engines, std::vector<uint32_t>& candidates) const {
    double least = std::numeric_limits<double>::infinity(), fewest = least;
    for (const uint32_t e : candidates) least = std::min(least, views_[e].load);
    const auto requests = [&](uint32_t e) { return waiting(engines[e]) + running(engines[e]) + unseen(engines[e]); };
    for (const uint32_t e : candidates) {
      if (views_[e].load <= least) fewest = std::min(fewest, requests(e));
    }
    std::erase_if(candidates, [&](uint32_t e) { return views_[e].load > least || requests(e) > fewest; });
  }

  std::string_view name_;
  Score score_;
  EnginePolicyOptions options_;
  Chooser chooser_;
  std::vector<WorkerView> views_;  // scratch: the chooser compares loads
};

class EngineRoundRobin final : public EnginePolicy {
 public:
  explicit EngineRoundRobin(Chooser chooser) : chooser_(chooser) {}

  std::optional<Decision> choose(std::span<const EngineView> engines, const EngineRequest&) override {
    Decision decision;
    decision.policy = kRoundRobinName;
    decision.reason = Reason::kRoundRobin;
    decision.candidates = available_engines(engines);
    if (decision.candidates.empty()) return std::nullopt;
    decision.worker = chooser_.next_in_turn(decision.candidates);
    return decision;
  }
  std::string_view name() const override { return kRoundRobinName; }

 private:
  Chooser chooser_;
};

class Replay final : public EnginePolicy {
 public:
  Replay(const EnginePolicyOptions& options, Chooser chooser)
      : otherwise_(kReplayName, request_count, options, chooser) {}

  std::optional<Decision> choose(std::span<const EngineView> engines, const EngineRequest& request) override {
    if (request.assigned >= 0) {
      const auto at = static_cast<size_t>(request.assigned);
      if (at < engines.size() && engines[at].available) {
        Decision decision;
        decision.worker = at;
        decision.policy = kReplayName;
        decision.reason = Reason::kAssigned;
        decision.candidates = {static_cast<uint32_t>(at)};
        return decision;
      }
    }
    return otherwise_.choose(engines, request);
  }
  std::string_view name() const override { return kReplayName; }

 private:
  LeastScore otherwise_;
};

Error wrong(std::string_view field, double given, std::string_view accepted) {
  return invalid(fmt::format("engine policy: {} is {}; accepted: {}", field, given, accepted), std::string(field));
}

bool within(double value, double low, double high) { return value >= low && value <= high; }

Status check(const EnginePolicyOptions& options) {
  const PressureOptions& p = options.pressure;
  constexpr double kMost = 1e12;
  if (!(p.kv_high > 0 && p.kv_high <= 1)) return wrong("kv_high", p.kv_high, "above 0, up to 1");
  if (!(p.kv_gap > 0 && p.kv_gap <= 1)) return wrong("kv_gap", p.kv_gap, "above 0, up to 1");
  if (!within(p.kv_weight, 0, kMost)) return wrong("kv_weight", p.kv_weight, "0 to 1e12");
  if (!within(p.expert_weight, 0, kMost)) return wrong("expert_weight", p.expert_weight, "0 to 1e12");
  if (!within(p.epsilon_tokens, 0, kMost)) return wrong("epsilon_tokens", p.epsilon_tokens, "0 to 1e12");
  if (!within(p.epsilon_share, 0, 1)) return wrong("epsilon_share", p.epsilon_share, "0 to 1");
  if (!within(options.clients, 1, kMost)) return wrong("clients", options.clients, "1 or more");
  if (!within(options.kv_lambda, 0, kMost)) return wrong("kv_lambda", options.kv_lambda, "0 to 1e12");
  return {};
}

}  // namespace

std::string_view to_string(TraceState state) {
  switch (state) {
    case TraceState::kFresh: return "fresh";
    case TraceState::kLate: return "late";
    case TraceState::kUnknown: return "unknown";
  }
  return "";
}

std::span<const std::string_view> engine_policy_names() { return kNames; }

Result<std::unique_ptr<EnginePolicy>> make_engine_policy(const EnginePolicyOptions& options) {
  using Made = std::unique_ptr<EnginePolicy>;
  const Result<TieBreak> tie_break = parse_tie_break(options.tie_break);
  if (!tie_break) return tie_break.error();
  if (Status ok = check(options); !ok) return std::move(ok).error();
  const Chooser chooser(*tie_break, options.seed);
  const auto least = [&](std::string_view name, LeastScore::Score score) {
    return Made(std::make_unique<LeastScore>(name, score, options, chooser));
  };
  if (options.name == kPressureName) return Made(std::make_unique<PressurePolicy>(options.pressure, chooser));
  if (options.name == kRoundRobinName) return Made(std::make_unique<EngineRoundRobin>(chooser));
  if (options.name == kRequestCountName) return least(kRequestCountName, request_count);
  if (options.name == kVllm21Name) return least(kVllm21Name, vllm_21);
  if (options.name == kVllm27Name) return least(kVllm27Name, vllm_27);
  if (options.name == kTotalTokensName) return least(kTotalTokensName, total_tokens);
  if (options.name == kLeastLoadName) return least(kLeastLoadName, least_load);
  if (options.name == kReplayName) return Made(std::make_unique<Replay>(options, chooser));
  return invalid(fmt::format("engine policy '{}'; accepted: {}", options.name, fmt::join(kNames, ", ")), "name");
}

}  // namespace kindred::policy
