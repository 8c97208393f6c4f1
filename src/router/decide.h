// A decode decision, timed and written down, for flows that have no more to say about it.
//
// Thread-safety: confined to the io_context's thread.
#pragma once

#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "expert/counts.h"
#include "fleet/choose.h"
#include "router/engine_leg.h"
#include "router/exchange.h"

namespace kindred::router {

// What every decision about this request asks; it borrows from the exchange.
fleet::Ask ask_of(const Exchange& exchange, fleet::LegLoad load, std::span<const fleet::WorkerId> exclude);

struct DecodeAsk {
  std::optional<PromptTarget> prefill = {};    // none: the decode worker computes the prompt, too
  std::string_view fingerprint = {};           // of the prefill worker
  std::optional<fleet::Dialect> dialect = {};  // none: any
  std::span<const fleet::WorkerId> exclude = {};
  fleet::LegLoad load = {};
  uint64_t prompt_tokens = 0;
  const expert::ExpertCounts* counts = nullptr;
  std::optional<double> known_share = {};  // of the prompt that the counts are of, if they are remembered ones
};

struct DecodeChoice {
  fleet::WorkerId worker = 0;
  std::shared_ptr<const expert::Inclusion> inclusion = {};  // for Fleet::take
};
// No value: no decode worker is available.
std::optional<DecodeChoice> decide_decode(Core& core, Exchange& exchange, const DecodeAsk& ask);

// What the decision log has of the prefill worker.
void note_prefill(const PromptTarget& prefill, DecisionRecord& record);

// Of the workers of `dialect` that have a decode worker to pair with: by the engine policy if there is one, else by the
// prefill policy.
std::optional<PromptTarget> decide_prefill(Core& core, Exchange& exchange, fleet::Dialect dialect,
                                           std::span<const fleet::WorkerId> exclude);

// Who does a whole request, written down. `by_engine`: by the engine policy, which must be in force; else by the
// prefill or decode policy (fleet/choose.h). No value: no worker of `role` is available.
std::optional<PromptTarget> decide_whole(Core& core, Exchange& exchange, Role role, bool by_engine,
                                         std::span<const fleet::WorkerId> exclude);

}  // namespace kindred::router
