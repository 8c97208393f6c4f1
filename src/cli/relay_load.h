// The clients of `kindred bench relay`: keep-alive connections that send one request after the other and
// look at answers no more than they must.
//
// Thread-safety: none; a call blocks and runs its own io_context.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/result.h"

namespace kindred::cli {

struct RelayLoad {
  std::string request;  // head and body, as sent
  size_t connections = 64;
  size_t requests = 1000;  // in all
  // Set for streams that are kept open: called once, when every connection has had its first bytes of an
  // answer. The load goes on for `hold_s` from then, and ends with answers cut.
  std::function<void()> when_all_stream = {};
  double hold_s = 0;
};

struct RelayResult {
  double wall_s = 0;
  uint64_t bytes = 0;              // of answers, heads included
  std::vector<double> latency_us;  // of each request, to the end of its answer
};

// Errors: kUnavailable (cannot connect), kCorrupt (an answer that is cut or not a 200).
Result<RelayResult> run_relay_load(uint16_t port, const RelayLoad& load);

// A chat request with a prompt of `prompt_bytes`.
std::string chat_request(size_t prompt_bytes, bool stream);

}  // namespace kindred::cli
