#include <algorithm>

#include "engine/scheduler.h"

namespace kindred::engine {

void Scheduler::admit() {
  // Strictly in order: a large job is not starved by small ones behind it.
  while (!waiting_.empty() && try_admit(waiting_.front())) waiting_.pop_front();
}

bool Scheduler::try_admit(Waiting& waiting) {
  const Job& job = waiting.job;
  if (free_sequences_.size() < sequences_needed(job)) return false;

  PrefixCache::Match match;
  const bool lookup = cache_enabled_ && job.prefix_cache && !job.gates && job.kind != Job::Kind::kDecode;
  if (lookup) match = cache_.match(job.prompt);
  cache_.pin(match.node);  // or making room could evict it
  uint32_t needed = own_cells(job, match);
  if (!make_room(needed)) {
    cache_.unpin(match.node);
    if (!running_.empty()) return false;
    // Nothing runs and still no room: a job that needs every cell there is cannot keep its cached prefix
    // as well as the cell for evaluating the last token again.
    match = {};
    needed = own_cells(job, match);
    if (!make_room(needed)) return false;
  }

  Running& running = running_.emplace_back();
  running.id = waiting.id;
  running.job = std::move(waiting.job);
  running.node = match.node;
  running.reserved = needed;
  reserved_ += needed;
  running.choices = make_choices(running.job);
  size_t wanted = sequences_needed(running.job);
  for (Choice& choice : running.choices) {
    if (!choice.active() || wanted == 0) continue;
    choice.sequence = free_sequences_.back();
    free_sequences_.pop_back();
    --wanted;
  }
  if (running.job.kind == Job::Kind::kDecode) {
    start_decode(running);
  } else {
    if (lookup) metrics_.prefix_queries.add(running.prompt_tokens());
    start_prefill(running, match);
  }
  return true;
}

size_t Scheduler::sequences_needed(const Job& job) {
  if (job.kind == Job::Kind::kPrefill) return 1;
  return static_cast<size_t>(std::ranges::count(job.choices, FinishReason::kNone, &ChoiceState::finish));
}

uint32_t Scheduler::cells_needed(const Job& job) {
  const auto prompt = static_cast<uint32_t>(job.prompt.size());
  if (job.kind == Job::Kind::kPrefill) return prompt;
  // The last token generated is never evaluated.
  return prompt + static_cast<uint32_t>(sequences_needed(job)) * (job.max_tokens - 1);
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
  running.cached = std::min(match.blocks * options_.block_tokens, prompt - 1);
  running.computed = running.cached;
  running.first_block = match.blocks;
  if (running.cached > 0) cache_.copy_to(match.node, running.choices[0].sequence, running.cached);
  metrics_.prompt_tokens.add(prompt);
  metrics_.prefix_hits.add(running.cached);
  if (!session_->captures()) return;
  const expert::ExpertShape& shape = model_.info().experts;
  running.counts.emplace(shape);
  running.suffix.emplace(shape);
  cache_.add_counts(match.node, *running.counts);
  running.block_counts.resize(prompt / options_.block_tokens - match.blocks, std::vector<uint8_t>(shape.cells(), 0));
  if (running.job.decode_counts) running.decode_counts.emplace(shape);
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
