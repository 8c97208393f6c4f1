#include <algorithm>

#include "engine/scheduler.h"

namespace kindred::engine {

namespace {

// Tokens whose KV a choice of a job that was preempted has to get back.
uint32_t lost_tokens(const ChoiceState& choice) {
  if (choice.finish != FinishReason::kNone || choice.generated.empty()) return 0;
  return static_cast<uint32_t>(choice.generated.size()) - 1;
}

}  // namespace

bool Scheduler::uses_cache(const Job& job) const {
  return cache_enabled_ && job.prefix_cache && !job.gates && job.kind != Job::Kind::kDecode;
}

// Its KV is gone, whether it was computed here or came by handoff, and its first tokens are out.
bool Scheduler::resumes(const Job& job) {
  return job.kind == Job::Kind::kFull && !job.choices.front().generated.empty();
}

void Scheduler::enqueue(Waiting waiting) {
  const Job& job = waiting.job;
  if (job.kind != Job::Kind::kDecode) {
    const uint32_t hit = uses_cache(job) ? cache_.look_up(job.prompt).blocks * options_.block_tokens : 0;
    waiting.prefill_tokens = job.prompt.size() - std::min<size_t>(hit, job.prompt.size() - 1);
    if (resumes(job)) {
      for (const ChoiceState& choice : job.choices) waiting.prefill_tokens += lost_tokens(choice);
    }
  }
  waiting_prefill_tokens_ += waiting.prefill_tokens;
  waiting_tokens_ += job.prompt.size();
  queue_.add({.sequence = waiting.id,
              .arrival_ns = waiting.arrived.time_since_epoch().count(),
              .prefill_tokens = waiting.prefill_tokens,
              .priority = job.priority,
              .preempted = waiting.preempted});
  waiting_.emplace(waiting.id, std::move(waiting));
}

Scheduler::Waiting Scheduler::dequeue(JobId id) {
  Waiting waiting = std::move(waiting_.extract(id).mapped());
  queue_.remove(id);
  waiting_prefill_tokens_ -= waiting.prefill_tokens;
  waiting_tokens_ -= waiting.job.prompt.size();
  return waiting;
}

void Scheduler::admit() {
  // Strictly in the queue's order: a large job at its head is not starved by small ones behind it.
  if (queue_.empty()) return;
  const int64_t now_ns = clock_.now().time_since_epoch().count();
  while (const auto next = queue_.next(now_ns)) {
    if (!try_admit(*next)) break;
  }
}

bool Scheduler::try_admit(JobId id) {
  const Job& job = waiting_.at(id).job;
  if (free_sequences_.size() < sequences_needed(job)) return false;

  PrefixCache::Match match;
  if (uses_cache(job)) match = cache_.match(job.prompt);
  cache_.pin(match.node);  // or making room could evict it
  // With optimistic admission, a block for each sequence that runs: or the newcomer would be the next to go.
  const bool optimistic = options_.kv_admission == KvAdmission::kOptimistic;
  const uint32_t headroom =
      optimistic ? (options_.sequences - static_cast<uint32_t>(free_sequences_.size())) * options_.block_tokens : 0;
  uint32_t needed = own_cells(job, match);
  if (!make_room(needed + headroom)) {
    cache_.unpin(match.node);
    if (!running_.empty()) return false;
    // Nothing runs and still no room: a job that needs every cell there is cannot keep its cached prefix
    // as well as the cell for evaluating the last token again.
    match = {};
    needed = own_cells(job, match);
    if (!make_room(needed)) return false;
  }
  Running& running = start(dequeue(id), match, needed);
  if (running.job.kind == Job::Kind::kDecode) {
    start_decode(running);
  } else {
    start_prefill(running, match);
  }
  return true;
}

Scheduler::Running& Scheduler::start(Waiting waiting, const PrefixCache::Match& match, uint32_t cells) {
  Running& running = running_.emplace_back();
  running.id = waiting.id;
  running.job = std::move(waiting.job);
  running.arrived = waiting.arrived;
  running.resumes = resumes(running.job);
  running.cached = waiting.cached;
  running.lost_computed = waiting.lost_computed;
  running.rows_lost = waiting.rows_lost;
  running.decode_counts = std::move(waiting.decode_counts);
  running.node = match.node;
  running.reserved = cells;
  reserved_ += cells;
  running.choices = make_choices(running.job);
  size_t wanted = sequences_needed(running.job);
  for (Choice& choice : running.choices) {
    if (!choice.active() || wanted == 0) continue;
    choice.sequence = free_sequences_.back();
    free_sequences_.pop_back();
    choice.reserved = decode_cells(running.job, choice.state);
    --wanted;
  }
  return running;
}

size_t Scheduler::sequences_needed(const Job& job) {
  if (job.kind == Job::Kind::kPrefill) return 1;
  return static_cast<size_t>(std::ranges::count(job.choices, FinishReason::kNone, &ChoiceState::finish));
}

uint32_t Scheduler::decode_cells(const Job& job, const ChoiceState& choice) const {
  if (job.kind == Job::Kind::kPrefill || choice.finish != FinishReason::kNone) return 0;
  const uint32_t most = job.max_tokens - 1;  // the last token generated is never evaluated
  if (options_.kv_admission == KvAdmission::kReserve) return most;
  return std::min(most, lost_tokens(choice) + options_.block_tokens);
}

uint32_t Scheduler::cells_needed(const Job& job) const {
  auto cells = static_cast<uint32_t>(job.prompt.size());
  for (const ChoiceState& choice : job.choices) cells += decode_cells(job, choice);
  return cells;
}

uint32_t Scheduler::own_cells(const Job& job, const PrefixCache::Match& match) const {
  const uint32_t cached = match.blocks * options_.block_tokens;
  // All of the prompt is cached: its last token is evaluated again, for its logits, in a cell of its own.
  return cells_needed(job) - cached + (cached == job.prompt.size() ? 1 : 0);
}

bool Scheduler::make_room(uint32_t cells) {
  const uint32_t free = free_cells();
  if (cells <= free) return true;
  const uint32_t blocks = (cells - free + options_.block_tokens - 1) / options_.block_tokens;
  if (blocks > cache_.evictable()) return false;
  metrics_.evicted_blocks.add(cache_.evict(blocks));
  return true;
}

uint32_t Scheduler::free_cells() const {
  return options_.kv_tokens - reserved_ - cache_.blocks() * options_.block_tokens;
}

std::vector<Scheduler::Choice> Scheduler::make_choices(const Job& job) const {
  std::vector<Choice> choices;
  choices.reserve(job.choices.size());
  for (const ChoiceState& state : job.choices) {
    choices.push_back(
        {state, TextAssembler(job.stop, state.held), Sampler(job.sampling, end_tokens_, job.prompt, state.generated)});
  }
  return choices;
}

void Scheduler::start_prefill(Running& running, const PrefixCache::Match& match) {
  const uint32_t prompt = running.prompt_tokens();
  running.computed = std::min(match.blocks * options_.block_tokens, prompt - 1);
  running.first_block = match.blocks;
  if (running.computed > 0) cache_.copy_to(match.node, prompt_sequence(running), running.computed);
  if (!running.resumes) {
    running.cached = running.computed;
    metrics_.prompt_tokens.add(prompt);
    metrics_.prefix_hits.add(running.cached);
    if (uses_cache(running.job)) metrics_.prefix_queries.add(prompt);
  }
  if (!session_->captures()) return;
  const expert::ExpertShape& shape = model_.info().experts;
  running.counts.emplace(shape);
  running.suffix.emplace(shape);
  cache_.add_counts(match.node, *running.counts);
  running.block_counts.resize(prompt / options_.block_tokens - match.blocks, std::vector<uint8_t>(shape.cells(), 0));
  if (running.job.decode_counts && !running.resumes) running.decode_counts.emplace(shape);
  if (running.job.gates) running.gates.emplace(shape.cells(), 0.0);
}

void Scheduler::start_decode(Running& running) {
  running.decoding = true;
  running.computed = running.prompt_tokens();
  if (session_->captures() && running.job.decode_counts) running.decode_counts.emplace(model_.info().experts);
  SequenceId first = -1;
  for (const Choice& choice : running.choices) {
    if (!choice.active()) continue;
    if (first < 0) {
      first = choice.sequence;
      if (Status restored = session_->restore(first, *running.job.kv, running.prompt_tokens()); !restored) {
        fail(running, std::move(restored).error());
        return;
      }
    } else {
      session_->copy_all(first, choice.sequence);
    }
  }
  running.job.kv.reset();
}

}  // namespace kindred::engine
