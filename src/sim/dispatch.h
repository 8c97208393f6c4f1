// The router, as far as decisions go: a fleet and its ledger, the policies, what is known of workers' caches. It
// decides by fleet/choose.h, as the router does, and keeps what the router keeps of a request.
//
// Ownership: cohorts are shared. Thread-safety: none. Time is the clock's, which is borrowed.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "expert/cohorts.h"
#include "fleet/choose.h"
#include "fleet/fleet.h"
#include "fleet/prefix_index.h"
#include "fleet/room.h"
#include "policy/decode_policy.h"
#include "policy/engine_policy.h"
#include "policy/prefill_policy.h"

namespace kindred::sim {

struct DispatchOptions {
  policy::PrefillPolicyOptions prefill;
  policy::DecodePolicyOptions decode;
  // Chooses engines, for prefill and whole requests, in place of those above. None: workers are chosen.
  std::optional<policy::EnginePolicyOptions> engine = {};
  std::shared_ptr<const expert::CohortModel> cohorts = nullptr;  // null: none
  fleet::FleetOptions fleet = {};
  int64_t decode_inflight = 0;  // requests a decode worker takes; 0: any number
  // What the router takes for a request's output, which it cannot know: a guess for its ledger of tokens.
  int64_t output_tokens_guess = 256;
  uint32_t workers = 64;  // that may hold KV, for the index
};

// Where a leg goes.
struct Destination {
  fleet::WorkerId worker = 0;
  std::optional<uint32_t> engine = {};  // none: the worker shares out its requests itself
};

// One request as the router knows it. Dropping it ends its leg and gives back its room.
struct Routed {
  std::string key;    // what prefix-hash hashes: equal beginnings of prompts have equal keys
  std::string label;  // of its domain; empty: none
  uint32_t prompt_tokens = 0;
  int32_t assigned = -1;                     // policy::EngineRequest::assigned
  std::vector<fleet::HeldTokens> held = {};  // when it arrived
  std::vector<fleet::WorkerId> tried_prefill = {}, tried_decode = {};
  fleet::LoadGuard leg = {};
  fleet::RoomGuard room = {}, place = {};
};

class Dispatcher {
 public:
  // Error: kInvalid, naming the option of the policy.
  static Result<std::unique_ptr<Dispatcher>> make(const Clock& clock, DispatchOptions options);

  // Unknown until up(); `url` is what rings hash.
  fleet::WorkerId add(Role role, std::string url);
  void up(fleet::WorkerId worker, uint32_t engines = 1);
  void assign_cohorts();  // row i to the i-th decode worker
  fleet::Fleet& fleet() { return fleet_; }

  // The request has come: what workers hold of its `pieces`, whose hashes follow from all before them.
  void arrived(Routed& request, std::span<const uint64_t> pieces, uint32_t piece_tokens);
  // Room in the decode pool; false: the router answers "all decode workers are full".
  bool reserve(Routed& request);

  // Each ends the request's leg and begins the next one, on a worker not tried before. No value: nobody is there.
  std::optional<Destination> prefill(Routed& request);
  std::optional<fleet::WorkerId> decode(Routed& request, const expert::ExpertCounts* counts);
  std::optional<Destination> whole(Routed& request);
  const policy::Decision& last() const { return last_; }  // of the last decision with a value

  // KV events, which reach the router at once.
  bool wants_events() const { return index_ != nullptr; }
  void stored(fleet::WorkerId worker, std::span<const uint64_t> chain);
  void evicted(fleet::WorkerId worker, std::span<const uint64_t> pieces);
  void cleared(fleet::WorkerId worker);

 private:
  Dispatcher(const Clock& clock, DispatchOptions options);
  fleet::Ask ask(const Routed& request, std::span<const fleet::WorkerId> exclude, fleet::LegLoad load) const;
  fleet::LegLoad whole_load(const Routed& request) const;
  std::optional<fleet::WorkerId> begin(Routed& request, std::optional<fleet::Choice> choice, fleet::LegLoad load);
  std::optional<Destination> begin_on_engine(Routed& request, Role role, const fleet::Ask& asked);

  const DispatchOptions options_;
  fleet::Fleet fleet_;
  fleet::DecodeRoom room_;
  std::unique_ptr<policy::PrefillPolicy> prefill_;
  std::unique_ptr<policy::DecodePolicy> decode_, plain_;
  std::unique_ptr<policy::EnginePolicy> engine_;  // null: none
  std::unique_ptr<fleet::PrefixIndex> index_;     // null: no policy asks what workers hold
  std::vector<fleet::PrefixIndex::Held> found_;
  policy::Decision last_;
};

}  // namespace kindred::sim
