// What the data-parallel engines of a worker do while a bench sends requests: looked at once a second.
//
// Thread-safety: none; an EngineWatch has a thread of its own, which only it touches.
#pragma once

#include <chrono>
#include <map>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/result.h"
#include "net/http_message.h"

namespace kindred::cli {

// All of the worker's engines, at one moment.
struct EngineSample {
  using ByEngine = std::map<std::string, double>;

  std::chrono::steady_clock::time_point at;
  ByEngine prompt_tokens, running, kv;                         // computed so far; requests; share of KV
  double waiting = 0;                                          // requests
  double preemptions = 0, paced_steps = 0, pace_overruns = 0;  // so far

  double in_engines() const;  // running and waiting
};

// `metrics`: a worker's page.
EngineSample read_engine_sample(const std::string& metrics, std::chrono::steady_clock::time_point at);
Result<EngineSample> sample_engines(const net::Endpoint& worker);

struct EngineUse {
  double gap_tokens_per_s = 0;  // of prompts, between the engines that computed most and least; mean over seconds
  double running = 0, kv = 0;   // requests and share of KV of an engine, mean over seconds
};
// From the first of `samples`, in order of time, to the last one not after `until`, or the second if that is later.
EngineUse engine_use(std::span<const EngineSample> samples, std::chrono::steady_clock::time_point until);

// Looks at once, and then every second until `finish` is called or it is destroyed.
class EngineWatch {
 public:
  explicit EngineWatch(net::Endpoint worker);
  std::vector<EngineSample> finish();  // once; takes up to a second

 private:
  void watch(const std::stop_token& stop);

  net::Endpoint worker_;
  std::vector<EngineSample> samples_;  // the thread's, until it has ended
  std::jthread thread_;                // last: it uses the others
};

}  // namespace kindred::cli
