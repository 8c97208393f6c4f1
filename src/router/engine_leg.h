// A leg that has a prompt to compute: which worker gets it, and, where an engine policy is in force, which of its
// engines; and what goes along with it, so that the worker runs it there and its traces tell that it has come.
//
// Pinned: by `X-data-parallel-rank` on kindred and vLLM workers, by a field of the body on SGLang
// (sglang_rank_field()), if the worker has more than one engine. Kindred workers get `X-Kindred-Dispatch`, too, which
// their traces name; vLLM's engines that push traces (integrations/vllm) get the same as `kindred_dispatch` in the
// body's `vllm_xargs`.
//
// Thread-safety: as decide.h.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fleet/choose.h"
#include "router/exchange.h"

namespace kindred::router {

inline constexpr std::string_view kXargs = "vllm_xargs";

struct PromptTarget {
  fleet::WorkerId worker = 0;
  policy::Reason reason = policy::Reason::kLeastLoaded;
  std::optional<uint32_t> rank = {};  // as an engine policy chose
  size_t engines = 1;                 // of the worker
  double prefill_tokens = 0;          // of the prompt, to be computed there

  bool pinned() const { return rank && engines > 1; }
};

// By the engine policy, which must be in force: over all engines of the workers of `role`, of `dialect` only if it is
// given. No value: nobody is available. `record`: what the decision log keeps of it.
std::optional<PromptTarget> decide_engine(Core& core, const Exchange& exchange, Role role,
                                          std::optional<fleet::Dialect> dialect,
                                          std::span<const fleet::WorkerId> exclude, fleet::LegLoad load,
                                          DecisionRecord* record = nullptr);

// Charges the worker, and the engine if one was chosen.
[[nodiscard]] fleet::LoadGuard take(Core& core, const PromptTarget& target, fleet::LegLoad load);

// The headers that pin and name the leg.
void add_engine_headers(const Core& core, const PromptTarget& target, const fleet::LoadGuard& guard,
                        net::RequestHead& head);

// The body for that target where it differs from `body`, as it may for completions, chat or not: a priority
// (router/vllm_priority.h), SGLang's rank, the name for vLLM.
// Error: kInvalid, for what is no JSON object.
Result<std::optional<std::string>> engine_body(const Core& core, const Exchange& exchange, const PromptTarget& target,
                                               const fleet::LoadGuard& guard, std::string_view body);

// `vllm_xargs` for a vLLM engine whose traces name what it has received: the client's own, if any, and the leg's name.
// None: nothing to tell, or the client's are none that a name could be added to.
std::optional<std::string> named_xargs(const Core& core, const PromptTarget& target, const fleet::LoadGuard& guard,
                                       std::string_view body);

// What the decision log has of a decision over engines: workers once each.
void note_decision(const fleet::EngineChoice& choice, DecisionRecord& record);

}  // namespace kindred::router
