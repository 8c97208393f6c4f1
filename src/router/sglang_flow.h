// Prefill and decode on two SGLang servers: both get the client's request at once, with the address of the
// prefill worker's bootstrap server and a room number in which they find each other. The client gets the decode
// worker's answer; whichever fails takes the other with it.
//
// Both workers are chosen before there are expert counts. With a history (router/history.h) decode policies get those
// of the longest known prefix of the prompt, without one, or where it knows nothing, they go by load. The history
// learns from the prefill worker's answer, which no client sees: the decode worker's rows of the prompt are not its
// own. Only the prefill leg's body differs, so what the client gets stays byte for byte what it was.
//
// Thread-safety: none; one object per request, which must outlive run().
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "router/decide.h"
#include "router/exchange.h"
#include "router/history.h"

namespace kindred::router {

class SglangFlow {
 public:
  SglangFlow(CorePtr core, Exchange& exchange) : core_(std::move(core)), exchange_(exchange) {}

  net::Task<void> run();

 private:
  // True: the client has its answer, or is gone.
  net::Task<bool> run_pair(const PromptTarget& prefill, fleet::WorkerId decode, const fleet::Description& said);
  void look_up(const fleet::Description& said);
  void learn(fleet::WorkerId prefill, const std::string& fingerprint, bool whole);

  CorePtr core_;
  Exchange& exchange_;
  LegFailure failure_;
  HistoryKey key_;  // with a history; else empty
  KnownPrefix known_;
  std::optional<RoutedExpertsReader> reader_;  // of the prefill leg that was asked
};

// Where the two find each other, and, where the prefill worker's engine is pinned, which one it is.
struct SglangMeeting {
  std::string_view host;
  uint16_t port = 0;
  uint64_t room = 0;
  std::optional<uint32_t> prefill_rank = {};
  bool ask_experts = false;  // the prefill worker, which experts the prompt selects
  bool stream = false;       // what the client asks for

  bool legs_differ() const { return prefill_rank || ask_experts; }
};

// The body of one leg. The prefill worker is told its own rank as `routed_dp_rank`, the decode worker where the KV is
// as `disagg_prefill_dp_rank`. `return_routed_experts` goes to the prefill worker alone, and in a stream the wish for
// `usage`, which tells what to check the answer by. Error: kInvalid, for what is no JSON object.
Result<std::string> sglang_body(std::string_view body, const SglangMeeting& meeting, bool prefill);

// The room nearest below from which servers that know neither field find the rank: room modulo the number of engines.
uint64_t room_of_rank(uint64_t room, uint32_t rank, size_t engines);

}  // namespace kindred::router
