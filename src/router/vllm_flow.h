// Prefill and decode on two vLLM servers, by their KV connector: the prefill leg generates one token, which is
// thrown away, and its answer says where the KV is (`kv_transfer_params`, opaque here); with that the decode leg
// is the client's own request. Bodies are changed by splicing, so what the router does not know stays as it is.
//
// A plugin on the prefill worker may add `expert_counts` (docs/kindred-dialect.md) to those parameters: they are
// what locality-band decides by, and stay in the router.
//
// Thread-safety: none; one object per request, which must outlive run().
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "expert/counts.h"
#include "router/decide.h"
#include "router/exchange.h"

namespace kindred::router {

class VllmFlow {
 public:
  VllmFlow(CorePtr core, Exchange& exchange) : core_(std::move(core)), exchange_(exchange) {}

  net::Task<void> run();
  // A decode worker computes the prompt, too: for what cannot be told to leave its KV to another worker.
  net::Task<void> run_whole();

 private:
  enum class Step { kGoOn, kRetry, kDone };

  net::Task<Step> prefill();
  net::Task<Step> prefill_leg(fleet::LoadGuard& guard);  // to prefill_
  net::Task<Step> after_transport_error(fleet::WorkerId worker, Error error);
  Status read_reply(std::string_view reply);
  void read_counts(std::string_view json);
  net::Task<void> decode(std::string_view body, const DecodeAsk& ask);

  CorePtr core_;
  Exchange& exchange_;
  LegFailure failure_;
  PromptTarget prefill_;
  std::string params_;  // raw JSON for the decode leg
  uint64_t prompt_tokens_ = 0;
  std::shared_ptr<const expert::ExpertCounts> counts_;
};

// Whether Anthropic's `tool_choice` forces a call: vLLM parses the call's arguments before it answers, which fails for
// the one token of a prefill leg.
bool forces_tool_call(std::string_view body);

// The prefill leg's body, and the decode leg's; for tests too. `priority`, `xargs` (raw JSON of vllm_xargs): the
// router's own, if it sends any. Error: kInvalid, for what is no JSON object.
Result<std::string> vllm_prefill_body(std::string_view body, std::optional<int64_t> priority = {},
                                      const std::optional<std::string>& xargs = {});
Result<std::string> vllm_decode_body(std::string_view body, std::string_view params);

}  // namespace kindred::router
