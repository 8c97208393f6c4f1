// Prefill on one worker, decode on another, the second chosen when the first has shown which experts
// the prompt uses (docs/kindred-dialect.md). In a stream the client has its first token before that
// choice is made.
//
// Guarantees: nothing a worker does ends a stream that looks whole and is not; a lease is released
// once, however the request ends; expert counts stay in the router.
//
// Thread-safety: none; one object per request, which must outlive run().
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "expert/counts.h"
#include "router/decide.h"
#include "router/engine_leg.h"
#include "router/exchange.h"
#include "router/lease.h"
#include "router/prefill_reply.h"

namespace kindred::router {

class PdFlow {
 public:
  PdFlow(CorePtr core, Exchange& exchange);

  net::Task<void> run();

 private:
  enum class Step {
    kGoOn,     // this part worked
    kRetry,    // not on this worker; `failure_` says why
    kRestart,  // the prefill is lost: from the start again
    kDone,     // the client has its answer, or is gone
  };

  net::Task<Step> prefill();
  net::Task<Step> prefill_leg(const PromptTarget& target, fleet::LoadGuard& guard);
  net::Task<Step> send_finished();
  net::Task<bool> send_first();

  net::Task<Step> decode(bool may_restart);
  std::optional<DecodeChoice> choose_decode();
  fleet::LegLoad decode_load() const;
  void record(const fleet::Snapshot& snapshot, const policy::Decision& decision, double took_s);
  const expert::ExpertCounts* counts();
  net::Task<Step> decode_leg(fleet::WorkerId worker, bool may_restart, fleet::LoadGuard& load);
  net::Task<Step> refused(net::ClientResponse& response, fleet::WorkerId worker, bool may_restart);
  void forget_handoff();
  net::Task<Step> relay_events(net::ClientResponse& response, fleet::WorkerId worker, fleet::LoadGuard& load);
  net::Task<Step> relay_whole(net::ClientResponse& response, fleet::WorkerId worker);
  net::Task<Step> after_transport_error(fleet::WorkerId worker, std::string_view who, Error error);

  bool streams() const { return reply_->content_type.starts_with("text/event-stream"); }
  net::Headers own_headers() const;

  CorePtr core_;
  Exchange& exchange_;
  std::vector<fleet::WorkerId> tried_prefill_, tried_decode_;
  LegFailure failure_;  // of the last leg that did not work

  PromptTarget prefill_;
  std::optional<PrefillReply> reply_;
  std::optional<LeaseHold> lease_;
  std::string handoff_;
  std::shared_ptr<const expert::ExpertCounts> counts_;
  bool counts_read_ = false;
};

}  // namespace kindred::router
