// vLLM's `priority`: one int64 in a request's body, fixed when it is sent, by which a server that runs
// `--scheduling-policy priority` orders its queue, the lowest first. The router sends
//   arrival in ms + ms_per_token * prompt tokens to compute
// which is shortest prefill first with linear aging: a prompt of 5,000 tokens more waits 5 s longer and no more,
// whatever comes (Gimbal's Algorithm 2 with theta_age, as far as one number can carry it).
//
// Whether a server takes it is asked once per life of a worker: a completion of one token with priority 1. Engines
// that schedule by arrival refuse that (vLLM up to its V0 engine: "Got priority 1 but Priority scheduling is not
// enabled."), or take the field and ignore it (V1), where sending it does no harm either.
//
// Thread-safety: any thread, but for what says [control].
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <unordered_map>

#include "fleet/fleet.h"

namespace kindred::router {

class Core;
class Exchange;

enum class TakesPriority { kUnknown, kOn, kOff };
std::string_view to_string(TakesPriority takes);  // "unknown", "on", "off"

class Priorities {
 public:
  TakesPriority of(fleet::WorkerId worker) const {
    const std::lock_guard lock(mutex_);
    const auto found = takes_.find(worker);
    return found == takes_.end() ? TakesPriority::kUnknown : found->second;
  }
  void set(fleet::WorkerId worker, TakesPriority takes) {
    const std::lock_guard lock(mutex_);
    if (takes == TakesPriority::kUnknown) takes_.erase(worker);
    else takes_[worker] = takes;
  }

 private:
  mutable std::mutex mutex_;
  std::unordered_map<fleet::WorkerId, TakesPriority> takes_;
};

// What a leg to this worker carries; none: nothing, or what the client sent.
std::optional<int64_t> leg_priority(const Core& core, const Exchange& exchange, fleet::WorkerId worker,
                                    double prefill_tokens);

// arrival + tokens * ms_per_token, within int64.
int64_t priority_at(int64_t arrival_unix_ms, double prefill_tokens, double ms_per_token);

// [control] After a health check: asks a vLLM worker that is up and was not asked in this life, if anybody wants to
// know; forgets what one that is down has said.
void find_out_priority(const std::shared_ptr<Core>& core, fleet::WorkerId worker);

}  // namespace kindred::router
