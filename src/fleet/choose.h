// One decision, from the fleet's state to a worker: a snapshot, what workers hold of the prompt, who has room, and
// the policy's word. The router and the simulator decide by these functions, so that what is simulated is what
// is served.
//
// Nothing is taken here: who was chosen is charged by Fleet::take, with the decision's inclusion, and
// DecodeRoom::occupy.
// No value: nobody is available.
//
// Thread-safety: as the policy that is given; fleet and room lock themselves.
#pragma once

#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include "fleet/fleet.h"
#include "fleet/room.h"
#include "policy/decode_policy.h"
#include "policy/engine_policy.h"
#include "policy/prefill_policy.h"

namespace kindred::fleet {

using HeldTokens = std::pair<WorkerId, double>;  // of a prompt, from its start, in that worker's cache

// What is borrowed must live during the call.
struct Ask {
  std::string_view model = {};                   // empty: any
  double prompt_tokens = 0;                      // counted or estimated; 0: not known
  std::span<const HeldTokens> held = {};         // who is not named holds nothing
  std::span<const WorkerId> exclude = {};        // tried already
  LegLoad load = {};                             // what the leg adds to its worker
  std::string_view key = {};                     // policy::PrefillRequest::key
  std::string_view label = {};                   // policy::DecodeRequest::label
  std::string_view fingerprint = {};             // decode: of the prefill worker
  const expert::ExpertCounts* counts = nullptr;  // decode: of the prefill reply
  std::optional<Dialect> dialect = {};           // none means any
};

struct Choice {
  WorkerId worker = 0;
  Snapshot snapshot;          // what the decision was made on
  policy::Decision decision;  // its indices are positions in `snapshot`
};

struct EngineChoice {
  EngineRef engine;
  double prefill_tokens = 0;  // of the prompt, that it has to compute
  EngineSnapshot snapshot;
  policy::Decision decision;  // its indices are positions in `snapshot`
};

// An engine of the workers of `role`: for whole requests (kBoth), or for prefill, of those workers that have a decode
// worker to pair with. `assigned`: of policy::EngineRequest.
std::optional<EngineChoice> choose_engine(const Fleet& fleet, policy::EnginePolicy& policy, Role role, const Ask& ask,
                                          int32_t assigned = -1);

// Of the prefill workers that have a decode worker to pair with.
std::optional<Choice> choose_prefill(const Fleet& fleet, policy::PrefillPolicy& policy, const Ask& ask);

// Full workers are left out, as long as others are there: once a prompt has been run, a full worker is better
// than none. `cohorts` may be null.
std::optional<Choice> choose_decode(const Fleet& fleet, const DecodeRoom& room, policy::DecodePolicy& policy,
                                    const expert::CohortModel* cohorts, const Ask& ask);

// A worker of `role` that does the whole request. It is a prefill worker, too, for a prefill policy that looks at
// what workers hold; else the decode policy's `plain` decides, which needs no experts.
std::optional<Choice> choose_whole(const Fleet& fleet, policy::PrefillPolicy& prefill, policy::DecodePolicy& plain,
                                   Role role, const Ask& ask);

}  // namespace kindred::fleet
