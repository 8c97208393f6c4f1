// Prefill and decode on two SGLang servers: both get the client's request at once, with the address of the
// prefill worker's bootstrap server and a room number in which they find each other. The client gets the decode
// worker's answer; whichever fails takes the other with it.
//
// Both workers are chosen before there are expert counts, so decode policies go by load.
//
// Thread-safety: none; one object per request, which must outlive run().
#pragma once

#include <string>

#include "router/decide.h"
#include "router/exchange.h"

namespace kindred::router {

class SglangFlow {
 public:
  SglangFlow(CorePtr core, Exchange& exchange) : core_(std::move(core)), exchange_(exchange) {}

  net::Task<void> run();

 private:
  // True: the client has its answer, or is gone.
  net::Task<bool> run_pair(fleet::WorkerId prefill, fleet::WorkerId decode, std::string_view body);

  CorePtr core_;
  Exchange& exchange_;
  LegFailure failure_;
};

// Error: kInvalid, for what is no JSON object.
Result<std::string> sglang_body(std::string_view body, std::string_view bootstrap_host, uint16_t bootstrap_port,
                                uint64_t room);

}  // namespace kindred::router
