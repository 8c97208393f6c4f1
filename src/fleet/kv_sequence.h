// The order of one publisher's messages: what to do with a message of this number. Numbers begin at 0 with the
// engine's start and go up by one; messages get lost when either side is too slow, and can be asked for again.
//
// A number that goes back means that the engine was restarted: what it held is gone. A hole that cannot be filled
// means that blocks may be gone without our knowing, so what is known of the worker is given up as well: an index
// that claims too little costs a cache hit, one that claims too much sends prompts to where nothing is.
//
// Thread-safety: none. Pure.
#pragma once

#include <cstdint>
#include <optional>

namespace kindred::fleet {

class KvSequence {
 public:
  enum class Then { kApply, kDrop, kReplay };
  struct Step {
    bool reset = false;  // first forget what the worker holds
    Then then = Then::kApply;
    uint64_t replay_from = 0;  // kReplay: keep the message, ask for those from here on, then call resume()
    bool operator==(const Step&) const = default;
  };

  // `can_replay`: there is somebody to ask.
  explicit KvSequence(bool can_replay) : can_replay_(can_replay) {}

  // A message that was published now.
  Step live(uint64_t number) {
    Step step;
    if (last_live_ && number <= *last_live_) {
      step.reset = true;
      next_ = 0;
    }
    last_live_ = number;
    if (number <= next_ || !can_replay_) {
      const Step placed = place(number);
      return {.reset = step.reset || placed.reset, .then = placed.then};
    }
    step.then = Then::kReplay;
    step.replay_from = next_;
    return step;
  }
  // One that was asked for.
  Step replayed(uint64_t number) { return place(number); }
  // The message that was kept, once the replay has ended or failed.
  Step resume() { return place(*last_live_); }

 private:
  Step place(uint64_t number) {
    if (number < next_) return {.then = Then::kDrop};
    const bool hole = number > next_;
    next_ = number + 1;
    return {.reset = hole, .then = Then::kApply};
  }

  bool can_replay_;
  uint64_t next_ = 0;  // not applied yet
  std::optional<uint64_t> last_live_;
};

}  // namespace kindred::fleet
