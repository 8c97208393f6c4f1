// What this router has sent to one engine and not seen the end of, and how much of it the engine's latest trace
// includes already. A trace is a few milliseconds old when it is read; until it includes a request, the router must
// count it itself, or all that comes in between goes to the same engine (Gimbal's compensation).
//
// A request is in one of two states: unseen, from begin() to the trace that includes it, and seen. Traces that carry
// the ids of what the engine has received say so exactly; a poll, which carries none, has seen what had been sent
// before it was asked for, and a trace that names nothing what had been answered. Whatever happens, end() forgets the
// request, so that an idle ledger is zero.
//
// Thread-safety: any thread; one short lock.
#pragma once

#include <cstdint>
#include <mutex>
#include <span>
#include <unordered_map>

#include "base/clock.h"

namespace kindred::fleet {

struct EngineDispatch {
  int64_t requests = 1;        // choices
  int64_t prefill_tokens = 0;  // of the prompt, to be computed there
  int64_t kv_tokens = 0;       // that it will hold: prompt, and output as far as it can be told
};

class EngineLedger {
 public:
  EngineLedger(const Clock& clock, uint64_t seed) : clock_(clock), seed_(seed) {}

  uint64_t begin(const EngineDispatch& dispatch);  // its id, never 0
  void answered(uint64_t id);                      // it has begun to answer: its prompt is computed
  void end(uint64_t id);
  void seen(std::span<const uint64_t> ids);
  void seen_before(MonotonicTime when);
  void seen_answered();  // all that have begun to answer

  struct Sums {
    int64_t requests = 0;
    int64_t unseen_requests = 0, unseen_prefill_tokens = 0, unseen_kv_tokens = 0;
    int64_t unanswered_requests = 0, unanswered_tokens = 0;  // prompts, seen or not, without an answer yet
    double mean_prompt_tokens = 0;                           // of all that was ever sent; 0: nothing was
    double ended_per_s = 0;                                  // lately
  };
  Sums sums() const;

 private:
  struct Item {
    EngineDispatch dispatch;
    MonotonicTime at;
    bool seen = false, answered = false;
  };
  void see(Item& item);
  void answer(Item& item);
  double decayed_rate(MonotonicTime now) const;

  const Clock& clock_;
  const uint64_t seed_;
  mutable std::mutex mutex_;
  std::unordered_map<uint64_t, Item> items_;
  Sums sums_;  // but for the last two
  uint64_t begun_ = 0;
  double prompt_tokens_begun_ = 0;
  double rate_ = 0;  // ends a second, as of rate_at_
  MonotonicTime rate_at_{};
};

}  // namespace kindred::fleet
