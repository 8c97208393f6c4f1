// Optimistic admission: reservations that grow, and who has to give way when they cannot.
#include <algorithm>

#include "engine/scheduler.h"

namespace kindred::engine {

// Terminates: each round ends a running job, and a job alone finds room for all that it was accepted with, since
// whatever is cached can then be evicted. Progress: of several jobs the one with most to lose is never the victim.
bool Scheduler::grow_decodes() {
  bool preempted = false;
  for (Running& running : running_) {
    for (size_t c = 0; !running.done && running.decoding && c < running.choices.size(); ++c) {
      Choice& choice = running.choices[c];
      while (!running.done && choice.active() && choice.state.generated.size() > choice.reserved &&
             !grow(running, choice)) {
        preempt(least_loss());
        preempted = true;
      }
    }
  }
  if (preempted) sweep();
  return preempted;
}

bool Scheduler::grow(Running& running, Choice& choice) {
  const uint32_t cells = std::min(options_.block_tokens, running.job.max_tokens - 1 - choice.reserved);
  if (!make_room(cells)) return false;
  choice.reserved += cells;
  running.reserved += cells;
  reserved_ += cells;
  return true;
}

// Of several, the one admitted last.
Scheduler::Running& Scheduler::least_loss() {
  Running* victim = nullptr;
  uint32_t least = 0;
  for (Running& running : running_) {
    if (running.done) continue;
    const uint32_t loss = tokens_lost(running);
    if (victim != nullptr && loss > least) continue;
    victim = &running;
    least = loss;
  }
  KINDRED_CHECK(victim != nullptr);
  return *victim;
}

// What it would have to compute again if its cached blocks stay where they are.
uint32_t Scheduler::tokens_lost(const Running& running) const {
  const uint32_t back = cache_.depth(running.node) * options_.block_tokens;
  uint32_t lost = running.computed - std::min(back, running.computed);
  for (const Choice& choice : running.choices) {
    if (choice.active()) lost += choice.in_kv;
  }
  return lost;
}

void Scheduler::preempt(Running& running) {
  metrics_.preemptions.add();
  Waiting waiting{.id = running.id, .job = std::move(running.job), .arrived = running.arrived, .preempted = true};
  waiting.lost_computed = std::max(running.computed, running.lost_computed);
  waiting.cached = running.cached;
  if (running.decoding || running.resumes) {
    waiting.rows_lost = running.rows_lost;
    waiting.decode_counts = std::move(running.decode_counts);
  }
  if (running.decoding) {
    // As after a handoff, but its KV has to be computed.
    waiting.job.kind = Job::Kind::kFull;
    waiting.job.gates = false;
    for (size_t c = 0; c < running.choices.size(); ++c) {
      waiting.job.choices[c] = running.choices[c].state;
      waiting.job.choices[c].held = running.choices[c].text.held();
    }
  }
  release(running);
  enqueue(std::move(waiting));
}

}  // namespace kindred::engine
