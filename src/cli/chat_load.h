// Sends chat requests to an OpenAI-compatible server, some at a time, and says what came back and
// when. Used by demo, record and bench.
//
// Thread-safety: none; run_chats blocks its caller and runs its own io_context.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "expert/counts.h"
#include "expert/gates.h"
#include "net/http_message.h"

namespace kindred::cli {

struct ChatCall {
  std::string id;      // X-Request-Id
  std::string domain;  // X-Kindred-Domain, for the decode policy `domain`; empty: not sent
  std::string prompt;
  int64_t max_tokens = 64;
  double temperature = 0;
  int64_t seed = 0;
  bool ignore_eos = false;
  bool prefix_cache = true;
  bool expert_counts = false;
  bool expert_gates = false;
};

struct ChatAnswer {
  Status status;  // ok only if the stream ended with [DONE]
  std::string text;
  std::string finish_reason;
  uint32_t prompt_tokens = 0, completion_tokens = 0;
  double ttft_s = 0;   // request sent to first event
  double total_s = 0;  // request sent to last event
  std::optional<expert::ExpertCounts> prompt_counts, decode_counts;
  std::optional<expert::ExpertGates> gates;

  // Seconds per output token after the first; nothing for a single token.
  std::optional<double> tpot_s() const {
    if (completion_tokens < 2) return std::nullopt;
    return (total_s - ttft_s) / (completion_tokens - 1);
  }
};

struct LoadOptions {
  std::string model;  // empty: left out
  size_t concurrency = 1;
  // Open loop: call i is sent at this time after the start, however many are under way; `concurrency` has no
  // say. Empty: closed loop, the next call when one of `concurrency` has ended.
  std::vector<double> arrivals_s = {};
  // Called after each answer, in the order of completion.
  std::function<void(size_t index, const ChatAnswer&)> on_answer;
};

// Answers in the order of `calls`. Each call is streamed.
std::vector<ChatAnswer> run_chats(const net::Endpoint& server, std::span<const ChatCall> calls,
                                  const LoadOptions& options);

// One GET or POST with a small JSON body ("" for GET), for start-up checks and metrics. Status must be 2xx.
Result<std::string> fetch(const net::Endpoint& server, const std::string& target, const std::string& post_body = {});

// The value at quantile `q` of `values` (nearest rank), 0 if there is none.
double quantile(std::vector<double> values, double q);

// The sum over all series named exactly `name` in Prometheus text.
double metric_sum(const std::string& metrics, const std::string& name);

// The same, by the value of `label`; series without it are left out.
std::map<std::string, double> metric_by_label(const std::string& metrics, const std::string& name,
                                              const std::string& label);

}  // namespace kindred::cli
