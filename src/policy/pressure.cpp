#include "policy/pressure.h"

#include <algorithm>
#include <limits>

namespace kindred::policy {

double mean_expert_pressure(std::span<const EngineView> engines) {
  double sum = 0;
  size_t known = 0;
  for (const EngineView& engine : engines) {
    if (!engine.available || engine.trace != TraceState::kFresh) continue;
    sum += engine.expert_pressure;
    ++known;
  }
  return known == 0 ? 0 : sum / static_cast<double>(known);
}

Pressure pressure_of(const EngineView& engine, double mean_expert_pressure, const PressureOptions& options) {
  Pressure out;
  if (options.remaining) out.remaining = engine.remaining_prefill_tokens;
  if (options.waiting) out.waiting = engine.waiting_prefill_tokens;
  if (options.compensation) out.compensation = engine.compensation_tokens;
  if (options.kv) out.kv = options.kv_weight * engine.kv_usage;
  if (options.experts && mean_expert_pressure > 0) {
    out.experts = options.expert_weight * std::max(0.0, engine.expert_pressure / mean_expert_pressure - 1);
  }
  return out;
}

bool PressurePolicy::score(std::span<const EngineView> engines, const EngineRequest& request, Decision& decision) {
  const double expert_mean = mean_expert_pressure(engines);
  scores_.assign(engines.size(), 0);
  double sum = 0;
  size_t known = 0;
  for (const uint32_t e : decision.candidates) {
    if (engines[e].trace == TraceState::kLate) return false;
    if (engines[e].trace != TraceState::kFresh) continue;
    scores_[e] = pressure_of(engines[e], expert_mean, options_).score();
    sum += scores_[e];
    ++known;
  }
  if (known == 0) return false;
  const double mean = sum / static_cast<double>(known);
  for (const uint32_t e : decision.candidates) {
    const EngineView& engine = engines[e];
    if (engine.trace == TraceState::kUnknown) {
      scores_[e] = std::max(mean, options_.compensation ? engine.compensation_tokens : 0);
    }
    const double own = std::max(0.0, request.prompt_tokens - (options_.held ? engine.held_tokens : 0));
    if (engine.share < 1) scores_[e] = (scores_[e] + own) / engine.share - own;
    scores_[e] += own;
  }
  return true;
}

std::optional<uint32_t> PressurePolicy::emptiest(std::span<const EngineView> engines,
                                                 std::span<const uint32_t> candidates) const {
  if (!options_.kv) return std::nullopt;
  double most = 0, least = std::numeric_limits<double>::infinity();
  std::optional<uint32_t> at;
  for (const uint32_t e : candidates) {
    if (engines[e].trace != TraceState::kFresh) continue;
    most = std::max(most, engines[e].kv_usage);
    if (engines[e].kv_usage < least) {
      least = engines[e].kv_usage;
      at = e;
    }
  }
  if (most > options_.kv_high && most - least > options_.kv_gap) return at;
  return std::nullopt;
}

std::optional<Decision> PressurePolicy::choose(std::span<const EngineView> engines, const EngineRequest& request) {
  Decision decision;
  decision.policy = name();
  for (uint32_t e = 0; e < engines.size(); ++e) {
    if (engines[e].available) decision.candidates.push_back(e);
  }
  if (decision.candidates.empty()) return std::nullopt;
  if (!score(engines, request, decision)) {
    decision.reason = Reason::kOrdered;
    decision.fallback = FallbackReason::kNoTrace;
    decision.worker = chooser_.next_in_turn(decision.candidates);
    return decision;
  }
  decision.scores.assign(engines.size(), std::numeric_limits<float>::quiet_NaN());
  double least = std::numeric_limits<double>::infinity(), sum = 0;
  for (const uint32_t e : decision.candidates) {
    decision.scores[e] = static_cast<float>(scores_[e]);
    least = std::min(least, scores_[e]);
    sum += scores_[e];
  }
  if (const auto free = emptiest(engines, decision.candidates)) {
    decision.reason = Reason::kLowestKv;
    decision.worker = *free;
    return decision;
  }
  const double mean = sum / static_cast<double>(decision.candidates.size());
  const double reach = least + std::max(options_.epsilon_tokens, options_.epsilon_share * mean);
  std::erase_if(decision.candidates, [&](uint32_t e) { return !(scores_[e] <= reach); });
  decision.reason = decision.candidates.size() > 1 ? Reason::kOrdered : Reason::kPressure;
  decision.worker = chooser_.next_in_turn(decision.candidates);
  return decision;
}

}  // namespace kindred::policy
