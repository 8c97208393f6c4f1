#include "fleet/choose.h"

#include <algorithm>
#include <vector>

#include "policy/kv_aware.h"

namespace kindred::fleet {
namespace {

void mark_held(Snapshot& snapshot, std::span<const HeldTokens> held) {
  for (const auto& [worker, tokens] : held) {
    const auto at = std::ranges::find(snapshot.ids, worker);
    if (at == snapshot.ids.end()) continue;
    double& marked = snapshot.views[static_cast<size_t>(at - snapshot.ids.begin())].held_tokens;
    marked = std::max(marked, tokens);
  }
}

void leave_out_full(const DecodeRoom& room, Snapshot& snapshot) {
  std::vector<size_t> full;
  for (size_t i = 0; i < snapshot.ids.size(); ++i) {
    if (snapshot.views[i].available && room.full(snapshot.ids[i])) full.push_back(i);
  }
  if (full.size() >= snapshot.available) return;
  for (const size_t at : full) snapshot.views[at].available = false;
  snapshot.available -= full.size();
}

policy::PrefillRequest prefill_request(const Fleet& fleet, const Ask& ask) {
  return {.key = ask.key, .prompt_tokens = ask.prompt_tokens, .load = fleet.unit_of(ask.load)};
}

std::optional<Choice> choice(Snapshot snapshot, std::optional<policy::Decision> decision) {
  if (!decision) return std::nullopt;
  const WorkerId worker = snapshot.ids[decision->worker];
  return Choice{.worker = worker, .snapshot = std::move(snapshot), .decision = *std::move(decision)};
}

}  // namespace

std::optional<EngineChoice> choose_engine(const Fleet& fleet, policy::EnginePolicy& policy, Role role, const Ask& ask,
                                          int32_t assigned) {
  EngineSnapshot snapshot = fleet.engine_snapshot({.role = role,
                                                   .model = ask.model,
                                                   .paired = role == Role::kPrefill,
                                                   .exclude = ask.exclude,
                                                   .load = ask.load,
                                                   .dialect = ask.dialect});
  for (const auto& [worker, tokens] : ask.held) {
    for (size_t i = 0; i < snapshot.engines.size(); ++i) {
      if (snapshot.engines[i].worker != worker) continue;
      snapshot.views[i].held_tokens = std::max(snapshot.views[i].held_tokens, tokens);
    }
  }
  std::optional<policy::Decision> decision =
      policy.choose(snapshot.views, {.prompt_tokens = ask.prompt_tokens, .assigned = assigned});
  if (!decision) return std::nullopt;
  const EngineRef engine = snapshot.engines[decision->worker];
  const double computes = std::max(0.0, ask.prompt_tokens - snapshot.views[decision->worker].held_tokens);
  return EngineChoice{
      .engine = engine, .prefill_tokens = computes, .snapshot = std::move(snapshot), .decision = *std::move(decision)};
}

std::optional<Choice> choose_prefill(const Fleet& fleet, policy::PrefillPolicy& policy, const Ask& ask) {
  Snapshot snapshot = fleet.snapshot({.role = Role::kPrefill,
                                      .model = ask.model,
                                      .paired = true,
                                      .exclude = ask.exclude,
                                      .load = ask.load,
                                      .dialect = ask.dialect});
  mark_held(snapshot, ask.held);
  std::optional<policy::Decision> decision = policy.choose({.workers = snapshot.views}, prefill_request(fleet, ask));
  return choice(std::move(snapshot), std::move(decision));
}

std::optional<Choice> choose_decode(const Fleet& fleet, const DecodeRoom& room, policy::DecodePolicy& policy,
                                    const expert::CohortModel* cohorts, const Ask& ask) {
  Snapshot snapshot = fleet.snapshot({.role = Role::kDecode,
                                      .model = ask.model,
                                      .fingerprint = ask.fingerprint,
                                      .exclude = ask.exclude,
                                      .load = ask.load,
                                      .dialect = ask.dialect,
                                      .experts = policy.wants_expert_load()});
  mark_held(snapshot, ask.held);
  leave_out_full(room, snapshot);
  const policy::DecodeRequest request = {.counts = ask.counts,
                                         .model_fingerprint = ask.fingerprint,
                                         .load = fleet.unit_of(ask.load),
                                         .label = ask.label,
                                         .prompt_tokens = ask.prompt_tokens};
  std::optional<policy::Decision> decision = policy.choose({.workers = snapshot.views, .cohorts = cohorts}, request);
  return choice(std::move(snapshot), std::move(decision));
}

std::optional<Choice> choose_whole(const Fleet& fleet, policy::PrefillPolicy& prefill, policy::DecodePolicy& plain,
                                   Role role, const Ask& ask) {
  Snapshot snapshot = fleet.snapshot({.role = role, .model = ask.model, .exclude = ask.exclude, .load = ask.load});
  mark_held(snapshot, ask.held);
  std::optional<policy::Decision> decision;
  if (prefill.name() == policy::kKvAwareName) {
    decision = prefill.choose({.workers = snapshot.views}, prefill_request(fleet, ask));
  } else {
    const policy::DecodeRequest request = {
        .load = fleet.unit_of(ask.load), .label = ask.label, .prompt_tokens = ask.prompt_tokens};
    decision = plain.choose({.workers = snapshot.views}, request);
  }
  return choice(std::move(snapshot), std::move(decision));
}

}  // namespace kindred::fleet
