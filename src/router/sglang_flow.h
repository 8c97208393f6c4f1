// Prefill and decode on two SGLang servers: both get the client's request at once, with the address of the
// prefill worker's bootstrap server and a room number in which they find each other. The client gets the decode
// worker's answer; whichever fails takes the other with it.
//
// Both workers are chosen before there are expert counts, so decode policies go by load.
//
// Thread-safety: none; one object per request, which must outlive run().
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "router/decide.h"
#include "router/exchange.h"

namespace kindred::router {

class SglangFlow {
 public:
  SglangFlow(CorePtr core, Exchange& exchange) : core_(std::move(core)), exchange_(exchange) {}

  net::Task<void> run();

 private:
  // True: the client has its answer, or is gone.
  net::Task<bool> run_pair(const PromptTarget& prefill, fleet::WorkerId decode, uint16_t bootstrap_port);

  CorePtr core_;
  Exchange& exchange_;
  LegFailure failure_;
};

// Where the two find each other, and, where the prefill worker's engine is pinned, which one it is.
struct SglangMeeting {
  std::string_view host;
  uint16_t port = 0;
  uint64_t room = 0;
  std::optional<uint32_t> prefill_rank = {};
};

// The body of one leg. The prefill worker is told its own rank as `routed_dp_rank`, the decode worker where the KV is
// as `disagg_prefill_dp_rank`. Error: kInvalid, for what is no JSON object.
Result<std::string> sglang_body(std::string_view body, const SglangMeeting& meeting, bool prefill);

// The room nearest below from which servers that know neither field find the rank: room modulo the number of engines.
uint64_t room_of_rank(uint64_t room, uint32_t rank, size_t engines);

}  // namespace kindred::router
